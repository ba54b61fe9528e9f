"""What a case costs by its formulas: what one rank multiplies, casts, sends and saves in one step; and MFU of a speed.

Say which MFU: its three definitions differ by a factor of 2. Where precisions are mixed every definition falls while
the speed rises, and only the weighted one can reach 100 %. All count what training needs, without recomputation.

Of the memory of a rank in a step, what is kept is exact in bytes of storages; what backward needs besides is a model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.expect.memory import block_elements, expected_live, expected_saved, expected_scalars, gradients
from harness.expect.work import Work, executed, work
from harness.matrix import linears
from harness.matrix.case import Case, Checkpointing, Layout
from harness.matrix.caseid import case_id
from harness.matrix.dims.fsdp import Unit, fsdp_units
from harness.matrix.dims.pp import held, stage_count
from harness.matrix.layout import coordinates
from harness.matrix.recipes import ITEM_BYTES
from harness.plugins.predict.machine import Peak, peak_of_device, transfers_if_balanced
from harness.registry import is_llama
from harness.result import CaseResult, Multiplied, Sent, sent_by
from harness.trace.counts import FLOAT8


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank and step. `step`: 2, because scales that are computed at once are those of the step before.

    Tokens are taken to be spread evenly over experts.
    """

    case_id: str
    world_size: int
    rank: int
    step: int
    tokens: int  # of a data-parallel rank
    refusal: str | None  # why torch must refuse the case
    work: tuple[Work, ...]
    executed: Mapping[str, Multiplied]  # by part and precision, as it is measured
    flops_per_token: Mapping[str, float]  # by precision, as torchtitan counts
    casts: int  # to float8, by linears
    bubble: float  # the share of a step in which a stage waits, if all computed equally long and nothing was sent
    wire: Mapping[str, Sent]  # by kind, dtype and mesh axis
    wire_of_axis: Mapping[str, Sent]  # all of them, by mesh axis
    saved_bytes: int | None  # for backward; None if a compiler chooses
    parameters: int
    active_parameters: int  # by which one token is multiplied: fewer where it is sent to some experts


def bubble(case: Case) -> float:
    """By forwards, gradients of inputs and gradients of weights that take the same time (arXiv:2401.10241, table 2)."""
    layout, microbatches = case.layout, case.train.accumulation
    shares = stage_count(layout) // layout.pp * microbatches
    if layout.schedule == "zero_bubble":  # gradients of weights fill what the other two leave
        shares = 3 * microbatches
    return (layout.pp - 1) / (shares + layout.pp - 1)


def metrics(case: Case, *, rank: int = 0) -> Metrics:
    """What the formulas say. HarnessError for a target without any, and for a rank that the case does not have."""
    expect = Expectations(case)
    if not expect.has_formulas:
        what = f"there is no formula for the model of {case.target}."
        raise HarnessError(what, where=case_id(case), fix="give --run, which measures it.")
    if not 0 <= rank < case.world_size:
        raise HarnessError(f"the case has ranks 0 to {case.world_size - 1}.", where=f"--rank {rank}")
    step = min(2, case.train.steps)
    terms = transfers_if_balanced(case, step=step, rank=rank, changes=expect.changes)
    saved = expected_saved(case, step=step, rank=rank, changes=expect.changes) if expect.saves_exactly else None
    return Metrics(
        case_id=case_id(case),
        world_size=case.world_size,
        rank=rank,
        step=step,
        tokens=case.local_batch * case.train.seq_len,
        refusal=None if expect.refusal is None else expect.refusal.reason,
        work=work(case, rank=rank),
        executed=executed(case, rank=rank),
        flops_per_token=flops_per_token_by_precision(case),
        casts=expect.of(rank).cast_calls,
        bubble=bubble(case),
        wire=sent_by((term.words, term.times, term.payload_bytes) for term in terms),
        wire_of_axis=sent_by((term.axis, term.times, term.payload_bytes) for term in terms),
        saved_bytes=None if saved is None else sum(saved.values()),
        parameters=linears.parameter_count(case),
        active_parameters=active_parameter_count(case),
    )


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one device trains. MFU is a share of 1; None if the device or its peak in a dtype is not known.

    `mfu_bf16_peak` holds all work against the BF16 peak, as torchtitan does; with float8 it is more than the device
    is used. `mfu_fp8_peak` holds all work against the FP8 peak. `mfu_weighted` is the time that the work takes at the
    peak of its precision, over the time that it took.
    """

    tokens_per_s: float
    tflops: float  # TFLOP/s
    mfu_bf16_peak: float | None = None
    mfu_fp8_peak: float | None = None
    mfu_weighted: float | None = None


def speed(case: Case, tokens_per_s: float, device: Peak | None) -> Speed:
    """Return the speed of one device that trains `tokens_per_s` tokens a second, its share of those of all."""
    tflops = {name: flops * tokens_per_s / 1e12 for name, flops in flops_per_token_by_precision(case).items()}
    total = sum(tflops.values())
    if device is None:
        return Speed(tokens_per_s=tokens_per_s, tflops=total)
    # The sum of work over peak; None if the device has no peak in one of the dtypes.
    shares = [done / peak if (peak := device.tflops(precision)) else None for precision, done in tflops.items()]
    return Speed(
        tokens_per_s=tokens_per_s,
        tflops=total,
        mfu_bf16_peak=total / device.bfloat16,
        mfu_fp8_peak=total / device.float8 if device.float8 else None,
        mfu_weighted=None if None in shares else math.fsum(filter(None, shares)),
    )


def tokens_per_device(case: Case, step_s: float) -> float:
    """Tokens a second and device of a run whose steps take `step_s` seconds: those of all ranks over their number."""
    return case.train.tokens / case.world_size / step_s


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A number of all ranks and steps: what a run measured, and the formula. None: it says nothing of it."""

    what: str
    measured: int | None
    formula: int | None

    @property
    def judged(self) -> str:
        """Return how both compare; empty if one is not known."""
        both = self.measured, self.formula
        return "" if None in both else "equal" if both[0] == both[1] else "DIFFERS"


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `predict cost` answers. `rows` and `step_s` are of a run, if any. `device`: what torch calls it."""

    schema: int = 1
    formula: Metrics | None
    rows: tuple[Row, ...] = ()
    peak_memory_bytes: int | None = None
    step_s: tuple[float, ...] = ()
    device: str = ""
    peak: Peak | None = None
    speed: Speed | None = None

    @property
    def differing(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.judged == "DIFFERS")


def run_report(case: Case, result: CaseResult) -> CostReport:
    """Return what a run of the case measured. HarnessError if no rank finished."""
    measured, traces = result.measured, () if result.run is None else result.run.traces
    if measured is None or not traces:
        raise HarnessError("nothing was measured: no rank finished.", where=result.case_id)
    device = traces[0].device
    peak = peak_of_device(device)
    timed = measured.step_s[1:] or measured.step_s  # the first step warms up, where there are others
    rate = tokens_per_device(case, median(timed)) if is_llama(case.target) else None  # FLOPs of others are not known
    return CostReport(
        formula=None,
        rows=(
            *_counts(measured.flops, measured.expected_flops, unit="FLOPs", field="flops"),
            *_counts(measured.flops, measured.expected_flops, unit="calls", field="calls"),
            Row(what="casts to float8", measured=measured.cast_calls, formula=measured.expected_cast_calls),
            *_counts(measured.wire, measured.expected_wire or {}, unit="bytes", field="payload_bytes"),
            *_counts(measured.wire, measured.expected_wire or {}, unit="calls", field="calls"),
            Row(what="bytes saved for backward", measured=measured.saved_bytes, formula=measured.expected_saved_bytes),
        ),
        peak_memory_bytes=measured.peak_memory_bytes,
        step_s=measured.step_s,
        device=device,
        peak=peak,
        speed=None if rate is None else speed(case, rate, peak),
    )


def _counts(
    measured: Mapping[str, Multiplied | Sent], wanted: Mapping[str, Multiplied | Sent], *, unit: str, field: str
) -> Iterator[Row]:
    for words in sorted({*measured, *wanted}):
        # what a run lacks is 0 where something of its kind was recorded; a formula may leave kinds out
        missing = 0 if measured else None
        yield Row(
            what=f"{unit} of {words}",
            measured=getattr(measured[words], field) if words in measured else missing,
            formula=getattr(wanted[words], field) if words in wanted else None,
        )


def flops_per_token(case: Case) -> int:
    """Of forward and backward, as torchtitan counts: 6 for every active parameter but the embedding's, and attention.

    The parameters of norms count too, though nothing multiplies by them: 2e-5 of Llama 3 8B.
    """
    shape = case.model.shape
    looked_up = 0 if case.model.tied else shape.dim * case.model.padded_vocab_size
    parameters = active_parameter_count(case) - looked_up
    attention = 12 * shape.layers * shape.heads * shape.head_dim * case.train.seq_len
    return linears.FLOPS_PER_PARAMETER_AND_TOKEN * parameters + attention


def flops_per_token_by_precision(case: Case) -> Mapping[str, float]:
    """`flops_per_token` by precision: what matmuls in float8 do not do counts in the dtype of the case."""
    alone = replace(case, layout=Layout(), train=replace(case.train, global_batch=1, accumulation=1))
    float8 = sum(entry.flops for entry in work(alone) if entry.precision == FLOAT8) / case.train.seq_len
    total = flops_per_token(case)
    return {FLOAT8: float8, case.train.dtype: total - float8} if float8 else {case.train.dtype: float(total)}


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank. All but the last three are exact.

    `saved`: by autograd, between forward and backward. `kept`: what is alive besides at that moment, logits and weights
    that FSDP2 does not free. `gradients`: after backward.
    """

    rank: int
    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    saved: int
    kept: int
    probabilities: int  # of the saved bytes, those that backward of the loss frees
    loss: int  # what it adds before: gradients as large
    block: int  # what backward of a block adds: gathered weights, gradients, what it recomputes
    update: int  # what the optimizer adds

    @property
    def state(self) -> int:
        """Return the bytes that live between steps."""
        return self.parameters + self.buffers + self.optimizer

    @property
    def before_backward(self) -> int:
        """Return the bytes between forward and backward: exact."""
        return self.state + self.saved + self.kept

    @property
    def certain(self) -> int:
        """Return the larger of the exact numbers of bytes: between forward and backward, and after backward."""
        return max(self.before_backward, self.state + self.gradients)

    @property
    def peak(self) -> int:
        """Return the most of the moments listed: in backward of the loss, of the last block and of the first, and in
        the update. A lower bound: casts in eager float8, and what else is alive for a moment, are missing.
        """
        last = self.before_backward - self.probabilities + self.block
        updating = self.state + self.gradients + self.update
        return max(self.before_backward + self.loss, last, self.state + self.gradients + self.block, updating)


def memory(case: Case, *, rank: int, saves_attention: bool = True) -> Memory:
    """Return what the formulas say of a rank in step 2, with eager blocks: a compiler chooses what compiled ones save.

    `saves_attention`: `selective_op` saves the output of attention, which is so for every kernel but the CPU's.
    """
    case = replace(case, compile="none", layout=replace(case.layout, async_tp=False))
    units = fsdp_units(case, rank)
    padded, own, states = _shards(case, units, rank)
    item, last = ITEM_BYTES[case.parameter_dtype], case.model.shape.layers - 1
    saved = sum(expected_saved(case, step=2, rank=rank).values())
    live = expected_live(case, rank=rank, moment="forward")
    on_device = sum(storage.nbytes for storage in live if storage.dtype != "uint8")  # generators are on the host
    scalars = expected_scalars(case, moment="forward") * ITEM_BYTES[case.wide_dtype]
    return Memory(
        rank=rank,
        parameters=(padded if case.uses_fsdp else own) * item,
        buffers=case.train.seq_len * case.model.shape.head_dim * ITEM_BYTES[case.wide_dtype],
        optimizer=states * item,
        gradients=sum(gradient.nbytes for gradient in gradients(case, rank)),
        saved=saved + (_attention_bytes(case) if saves_attention else 0),
        kept=scalars + on_device,
        probabilities=(probabilities := _probability_bytes(case, rank)),
        loss=_loss_bytes(case, probabilities),
        block=_block_bytes(case, [unit for unit in units if unit.name.startswith(f"layers.{last}")]),
        update=(own + 2 * _whole_matrices(case, rank)) * item,
    )


def _whole_matrices(case: Case, rank: int) -> int:
    """Return the elements of the matrices of which Muon gathers gradient and momentum."""
    fqns = held(case, rank, linears.linear_fqns(case)) if case.train.optimizer == "muon" else ()
    return sum(
        math.prod(linears.linear_features(case, linears.linear_name(fqn))) for fqn in fqns if fqn != linears.OUTPUT_FQN
    )


def _shards(case: Case, units: tuple[Unit, ...], rank: int) -> tuple[int, int, int]:
    """Return the elements of all parameters of a rank: as FSDP2 pads them, of its own rows, and of their states."""
    padded, own, states = 0, 0, 0
    update, of_blocks = case.train.update, {*linears.linear_fqns(case)} - {linears.OUTPUT_FQN}
    for unit in units:
        axis = "efsdp" if linears.EXPERTS in unit.name else "dp_shard"
        padded, at = padded + unit.shard_elements, coordinates(case.layout, rank, (axis,))[axis]
        for weight in unit.weights:
            elements = linears.shard_size(weight.rows, unit.ranks, at) * weight.columns
            own += elements
            states += elements * (update.of_linears if weight.fqn in of_blocks else update.states)
    return padded, own, states


def _attention_bytes(case: Case) -> int:
    """Return the output and logsumexp of attention in every block that `selective_op` wraps."""
    if case.checkpointing.mode != "selective_op":
        return 0
    query = linears.local_features(case, "attention.wq")[1] * ITEM_BYTES[case.train.dtype]
    sums = case.model.shape.heads // case.layout.tp * ITEM_BYTES[case.wide_dtype]
    return case.model.shape.layers * case.tokens_per_rank * (query + sums)


def _probability_bytes(case: Case, rank: int) -> int:
    return case.tokens_per_rank * linears.width_of_logits(case, rank) * ITEM_BYTES[case.wide_dtype]


def _loss_bytes(case: Case, probabilities: int) -> int:
    """Two gradients of the log-probabilities. Loss parallel has a third one, and indices of every token."""
    if case.layout.shares_of_logits == 1:
        return 2 * probabilities
    return 3 * probabilities + case.tokens_per_rank * ITEM_BYTES["int64"]


def _block_bytes(case: Case, units: Sequence[Unit]) -> int:
    """Weights of two blocks as FSDP2 gathers them, and of one: unreduced gradients, what recomputing saves, gradients.

    The last are those of the feed-forward: two as wide as the model, three as wide as its hidden features. `units`: of
    the last block.
    """
    dtype, last = case.train.dtype, case.model.shape.layers - 1
    sizes = [(weight, unit.shard_of(weight) * unit.ranks) for unit in units for weight in unit.weights]
    gathered = sum(size * (1 if weight.gathered_in_float8 else ITEM_BYTES[dtype]) for weight, size in sizes)
    whole = sum(size for _, size in sizes)
    unreduced = whole * (ITEM_BYTES[dtype] + ITEM_BYTES[case.reduce_dtype])
    hidden = next(name for name in linears.block_linears(case.model, last) if name.endswith("w1"))
    widths = 2 * case.model.shape.dim + 3 * linears.local_features(case, hidden)[1]
    elements = case.tokens_per_rank * widths
    if case.model.experts:
        elements += case.sent_rows * (2 * case.model.shape.dim + 3 * case.model.expert_dim)
    activations = elements * ITEM_BYTES[dtype]
    if case.checkpointing.wraps(last):
        saved = block_elements(replace(case, checkpointing=Checkpointing()), last, step=2)
        activations += sum(count * ITEM_BYTES[saved_dtype] for saved_dtype, count in saved.items())
    return (2 * gathered + unreduced if case.uses_fsdp else 0) + activations


def active_parameter_count(case: Case) -> int:
    """Parameters that one token is multiplied by, with those of the embedding and norms: `top_k` experts of a block."""
    model, experts = case.model, linears.expert_parameters(case.model)[0]
    return linears.parameter_count(case) - (experts - experts * model.top_k // model.experts if model.experts else 0)
