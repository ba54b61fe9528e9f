"""The predicted time of one step on one rank, by its parts: a model, not a measurement.

Matmuls take the longer of multiplying and of moving their operands. Everything else moves memory, multiplies at its own
rate or waits for wires. FSDP's collectives run behind compute, those of tensor parallelism do not.

Casts to float8 are memory traffic. In a compiled block a cast along the contiguous axis is one kernel or two; one along
the other axis writes transposed, which is slow. In an eager one every operator reads and writes all elements. Casts to
MXFP8 are one kernel along either axis, eager too, and their scales are moved once more, to the order of the hardware.
With plain TP styles a rank casts gathered activations whole: tensor parallelism divides matmuls, and not these casts.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from harness.expect.work import ATTENTION, Gemm, alike_modules, work
from harness.matrix import linears
from harness.matrix.case import Case, Float8
from harness.matrix.dims.dimension import Transfer
from harness.matrix.dims.tp import fusion_candidates
from harness.matrix.layout import SAME_BATCH_AXES
from harness.matrix.recipes import E8M0, ITEM_BYTES, ROW, TENSOR, Operand, Recipe
from harness.plugins.predict.machine import Machine, transfer_s, transfers_if_balanced
from harness.trace.counts import FLOAT8

_CAUSAL = 0.5  # of the products of attention, which `work` counts whole
_FLASH_BACKWARD = 5 / 4  # products that the flash kernel computes for each that `work` counts
# Reads and writes of an activation of `dim` (norms, residual sums, rotations) and of `ffn_dim` (activation) for each
# token and block, counted from fused kernels; the share of forward is repeated by recomputation.
_DIM_PASSES, _FFN_PASSES, _FORWARD = 24, 8, 0.4
_ROW_PASSES = 16  # of every row of an expert: gathered, copied, padded, weighed, summed, and all of it in backward
_LOSS_BYTES = 20  # of every logit
_READ, _WRITE = 2, 1  # bytes of an element: bfloat16, float8
# The operators of an eager cast in torchao 0.18: abs, max, to float32, mul, clamp, to float8.
_EAGER_BYTES = (2 + 2) + 2 + (2 + 4) + (4 + 4) + (4 + 4) + (4 + 1)
# What a converted linear launches more than one in BF16, forward and backward, counted with torch 2.13, torchao 0.18.
EAGER_KERNELS: dict[Recipe, int] = {
    "tensorwise": 75, "rowwise": 101, "rowwise_with_gw_hp": 66, "mxfp8": 18, "mxfp8_floor": 18, "mxfp8_with_gw_hp": 12,
    "blockwise": 10
}  # fmt: skip
_OTHER_AXIS: frozenset[Operand] = frozenset(("i_gw", "go_gw", "w_gi"))
_SAME_INPUT = (("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"))


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step on one rank, by part. `dispatch_s`: of an eager step, whose kernels run behind it."""

    matmul_s: float
    cast_s: float
    padding_s: float  # copies of `pad_inner_dim`
    attention_s: float
    memory_s: float  # norms, activations, loss, optimizer, FSDP's copies
    tensor_parallel_s: float
    data_parallel_s: float  # what FSDP's collectives add
    dispatch_s: float
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the time of the step: kernels wait for their dispatch where that is longer."""
        device = self.device_s + self.tensor_parallel_s + self.data_parallel_s + self.other_s
        return max(device, self.dispatch_s)

    @property
    def device_s(self) -> float:
        return self.matmul_s + self.cast_s + self.padding_s + self.attention_s + self.memory_s


def predicted_step(case: Case, machine: Machine) -> Step:
    """Return the time of a step; time that belongs to no part is a share of the BF16 step."""
    twin = _parts(replace(case, float8=Float8()), machine)
    return replace(_parts(case, machine) if case.float8.enabled else twin, other_s=machine.rates.other * twin.total_s)


def speed_up(case: Case, machine: Machine) -> float:
    """Return how many times as fast as in BF16 a case is predicted to train."""
    twin = replace(case, float8=Float8())
    return predicted_step(twin, machine).total_s / predicted_step(case, machine).total_s


@functools.lru_cache(maxsize=1024)
def _parts(case: Case, machine: Machine) -> Step:
    kinds = alike_modules(case)
    step = Step(
        matmul_s=sum(len(kind.fqns) * gemm_s(gemm, machine) for kind in kinds for gemm in kind.gemms),
        cast_s=sum(len(fqns) * cast_s(cast, machine) for fqns, of_each in _alike_casts(case) for cast in of_each),
        padding_s=sum(len(kind.fqns) * gemm.padding_bytes for kind in kinds for gemm in kind.gemms)
        / machine.memory_bytes_s,
        attention_s=_attention_s(case, machine),
        memory_s=_memory_s(case, machine),
        tensor_parallel_s=0.0,
        data_parallel_s=0.0,
        dispatch_s=_dispatch_s(case, machine),
    )
    transfers = transfers_if_balanced(case, step=2, rank=0)
    return replace(
        step,
        tensor_parallel_s=_tensor_parallel_s(case, transfers, machine),
        data_parallel_s=_data_parallel_s(case, transfers, machine, behind_s=step.device_s),
    )


def gemm_s(gemm: Gemm, machine: Machine) -> float:
    """Return the seconds of all executions of a matmul on one rank."""
    return gemm.executions * once_s(gemm, machine)


def once_s(gemm: Gemm, machine: Machine) -> float:
    m, k = gemm.m, gemm.executed_k
    if gemm.role == "wgrad":
        k = -(-k // gemm.groups)  # of a grouped matmul every group is one of the rows of one expert
    else:
        m = -(-m // gemm.groups)
    plain_s = gemm.groups * matmul_s(m, gemm.n, k, gemm.precision, machine, launches=1 / gemm.groups)
    return plain_s / machine.rates.rowwise_matmul if gemm.scales_rows else plain_s


def matmul_s(m: int, n: int, k: int, precision: str, machine: Machine, *, launches: float = 1) -> float:
    """Return the seconds of one matmul [m, k] x [k, n] to bfloat16: the longest of compute, memory and launch."""
    rate = machine.matmul_flops_s(precision)
    for size in (m, n, k):
        rate *= size / (size + machine.rates.half_speed_size)
    moved = (m + n) * k * (1 if precision == FLOAT8 else ITEM_BYTES[precision]) + m * n * ITEM_BYTES["bfloat16"]
    return max(2 * m * n * k / rate, moved / machine.memory_bytes_s, launches * machine.rates.launch_us * 1e-6)


def _attention_s(case: Case, machine: Machine) -> float:
    rate = (machine.peak.tflops("bfloat16") or 0.0) * 1e12 * machine.rates.attention
    parts = [entry for entry in work(case) if entry.part == ATTENTION]
    done = sum(entry.executed_flops * (1 if entry.role == "forward" else _FLASH_BACKWARD) for entry in parts)
    return _CAUSAL * done / rate


def _memory_s(case: Case, machine: Machine) -> float:
    shape, layout, tokens = case.model.shape, case.layout, case.tokens_per_rank * case.train.accumulation
    item = ITEM_BYTES[case.train.dtype]
    wrapped = sum(map(case.checkpointing.wraps, range(shape.layers)))
    blocks = shape.layers + _FORWARD * wrapped
    activations = tokens * blocks * (_DIM_PASSES * shape.dim + _FFN_PASSES * shape.ffn_dim) * item / layout.tp
    if case.model.experts:  # rows are copied to groups and back, and results are weighed
        rows = case.sent_rows * case.train.accumulation * len(case.model.expert_layers)
        activations += rows * (_ROW_PASSES * shape.dim + _FFN_PASSES * case.model.expert_dim) * item
    loss = tokens * case.model.padded_vocab_size * _LOSS_BYTES / layout.tp
    of_experts, whole = linears.expert_parameters(case.model)[0], linears.parameter_count(case)
    parameters = (whole - of_experts) / layout.tp + of_experts / layout.ep
    # It reads parameter, gradient and states, and writes all of them but the gradient, in float32.
    update, of_blocks = case.train.update, {*linears.linear_fqns(case)} - {linears.OUTPUT_FQN}
    matrices = sum(math.prod(linears.linear_features(case, linears.linear_name(fqn))) for fqn in of_blocks)
    states = whole * update.states - matrices * (update.states - update.of_linears)
    optimizer = (3 * whole + 2 * states) / layout.tp / layout.dp_shard * ITEM_BYTES["float32"]
    # FSDP copies what it gathers (twice), and gradients before it reduces them in float32.
    gathered = 1 if case.gathers_float8 else 2
    copies = parameters * (2 * 2 * gathered + 2 + 4) if layout.dp_shard > 1 else 0
    return (activations + loss + optimizer + copies) / machine.memory_bytes_s


def _tensor_parallel_s(case: Case, transfers: Iterable[Transfer], machine: Machine) -> float:
    """Seconds of the collectives of TP and experts, which nothing overlaps unless async TP fuses them with matmuls."""
    waits = sum(transfer_s(transfer, case.layout, machine) for transfer in transfers if _is_waited_for(transfer))
    candidates = fusion_candidates(case)
    if not candidates:
        return waits
    fused = sum(candidate.fuses for candidate in candidates) / len(candidates)
    return waits * (1 - machine.rates.async_tp_hides * fused)


def _data_parallel_s(case: Case, transfers: Iterable[Transfer], machine: Machine, *, behind_s: float) -> float:
    """Return the seconds that FSDP's collectives add: the first gather and last reduction, and what slows compute."""
    sent = [transfer for transfer in transfers if not _is_waited_for(transfer)]
    times = [transfer_s(transfer, case.layout, machine) for transfer in sent]
    pairs = zip(sent, times, strict=True)
    ends = sum(time / transfer.times for transfer, time in pairs if "tok_embeddings" in transfer.purpose)
    hidden = sum(times) - ends
    return ends + machine.rates.behind_compute * min(hidden, behind_s) + max(0.0, hidden - behind_s)


def _is_waited_for(transfer: Transfer) -> bool:
    return transfer.axis in SAME_BATCH_AXES or transfer.kind == "all_to_all"


def _dispatch_s(case: Case, machine: Machine) -> float:
    """Return the seconds in which the host launches an eager step. A compiled one launches few kernels."""
    if case.compile != "none":
        return 0.0
    converted = sum(linears.is_converted(case, fqn) for fqn in linears.linear_fqns(case))
    kernels = converted * EAGER_KERNELS.get(case.float8.recipe, 0)
    blocks = (case.model.shape.layers + 1) * machine.rates.block_dispatch_us
    return case.train.accumulation * (blocks + kernels * machine.rates.dispatch_us) * 1e-6


def cast_s(cast: "Cast", machine: Machine) -> float:
    rates = machine.rates
    moved = cast.straight_bytes + cast.transposed_bytes / rates.transposing + cast.column_bytes / rates.columns
    moved += cast.block_bytes / rates.blocks
    return max(moved / machine.memory_bytes_s, machine.rates.launch_us * 1e-6)


class Cast(msgspec.Struct, frozen=True, kw_only=True):
    """What the casts of one operand of a linear move in one rank and step, in bytes.

    `straight_bytes` in order; `transposed_bytes` by kernels that write transposed; `column_bytes` by those that also
    find a scale for each column; `block_bytes` by those that find a scale for each 32 values.
    """

    fqn: str
    operand: Operand
    straight_bytes: int = 0
    transposed_bytes: int = 0
    column_bytes: int = 0
    block_bytes: int = 0


def casts(case: Case) -> tuple[Cast, ...]:
    """Return the casts of every converted linear; () without float8."""
    return tuple(replace(cast, fqn=fqn) for fqns, of_each in _alike_casts(case) for fqn in fqns for cast in of_each)


def _alike_casts(case: Case) -> Iterator[tuple[Sequence[str], tuple[Cast, ...]]]:
    """Yield linears with the same casts, and those of the first: all blocks have the same few sizes."""
    kinds: dict[tuple[str, bool, int], list[str]] = {}
    for fqn in linears.linear_fqns(case):
        if linears.is_converted(case, fqn):
            kind = linears.linear_name(fqn), linears.is_checkpointed(case, fqn), _with_the_same_input(case, fqn)
            kinds.setdefault(kind, []).append(fqn)
    for (name, *_), fqns in kinds.items():
        yield fqns, tuple(_of_matmuls(case, fqns[0], case.tokens_per_rank, linears.local_features(case, name)))
    yield from (((cast.fqn,), (cast,)) for cast in _of_experts(case))


def _of_experts(case: Case) -> Iterator[Cast]:
    """Of grouped matmuls, which the recipe converts whatever `casts` says about linears."""
    model, local = case.model, case.local_experts
    plain = replace(case, float8=replace(case.float8, casts=()))
    for fqn in linears.expert_fqns(model) if case.float8.grouped_mm else ():
        features = model.shape.dim, model.expert_dim
        for name, sizes, times in (("w1", features, 2), ("w2", features[::-1], 1)):  # w3 is as large as w1
            for cast in _of_matmuls(plain, f"{fqn}.{name}", case.sent_rows, sizes, weights=local):
                yield from (cast,) * times


def _of_matmuls(case: Case, fqn: str, tokens: int, features: tuple[int, int], *, weights: int = 1) -> Iterator[Cast]:
    """Operands of forward are cast again where the block is recomputed."""
    backwards = case.train.accumulation
    forwards = backwards * (1 + case.train.evaluate + linears.is_checkpointed(case, fqn))
    inputs, outputs = features
    sites: tuple[tuple[Operand, int], ...] = (
        ("i", tokens * inputs * forwards),
        ("i_gw", tokens * inputs * backwards),
        ("w", weights * inputs * outputs * forwards),
        ("w_gi", weights * inputs * outputs * backwards),
        ("go", tokens * outputs * backwards),
        ("go_gw", tokens * outputs * backwards),
    )
    for operand, elements in sites:
        if block := case.float8.traits.block_of(operand):
            own = elements // _readers(case, fqn, operand)
            # The scale of a block is written and read; an exponent, of one byte, is written again.
            of_scale = 3 if case.float8.traits.scale_dtype == E8M0 else 2 * ITEM_BYTES["float32"]
            in_blocks = (_READ + _WRITE) * own + of_scale * own // max(1, math.prod(block))
            moved = {"block_bytes": in_blocks} if block[1] else _moved(case, fqn, operand, own)
            yield Cast(fqn=fqn, operand=operand, **moved)


def _readers(case: Case, fqn: str, operand: Operand) -> int:
    """How many linears read one cast of their input, each of which has its share of it: a compiler merges equal casts.

    Casts with a scale for each row are counted for every linear: so predictions fit what was published, also of what
    leaving wk and wv in BF16 gains.
    """
    merged = case.compile != "none" and case.float8.traits.block_of(operand) == TENSOR
    return _with_the_same_input(case, fqn) if merged and operand in ("i", "i_gw") else 1


def _with_the_same_input(case: Case, fqn: str) -> int:
    """Return how many converted linears have the input of this one, itself included."""
    name = linears.linear_name(fqn)
    same = next((names for names in _SAME_INPUT if name in names), (name,))
    return sum(linears.is_converted(case, f"{fqn.removesuffix(name)}{other}") for other in same)


def _shards(case: Case, fqn: str, operand: Operand) -> int:
    """Number of shards of a tensor that is cast before it is gathered; 0 if it is cast after."""
    if operand in ("w", "w_gi"):
        return case.layout.dp_shard if case.gathers_float8 else 0
    if case.float8.tp_styles == "plain" or case.layout.tp == 1 or fqn == linears.OUTPUT_FQN:
        return 0
    gathered = ("go", "go_gw") if linears.linear_name(fqn) in linears.ROWWISE else ("i", "i_gw")
    return case.layout.tp if operand in gathered else 0


def _moved(case: Case, fqn: str, operand: Operand, elements: int) -> dict[str, int]:
    """Return the bytes of a `Cast` of so many elements, by field."""
    rows, other_axis = case.float8.traits.block_of(operand) == ROW, operand in _OTHER_AXIS
    if shards := _shards(case, fqn, operand):
        if other_axis:  # a transposed copy of what was gathered in float8
            return {"transposed_bytes": 2 * _WRITE * elements}
        return {"straight_bytes": (2 * _READ + _WRITE) * elements // shards}
    if case.compile == "none":
        return {"straight_bytes": _EAGER_BYTES * elements}
    if not other_axis:  # a kernel holds a row whole, and reads a tensor twice
        return {"straight_bytes": (_READ * (1 if rows else 2) + _WRITE) * elements}
    if rows:
        return {"column_bytes": (2 * _READ + _WRITE) * elements}
    return {"transposed_bytes": (_READ + _WRITE) * elements}  # its scale is known
