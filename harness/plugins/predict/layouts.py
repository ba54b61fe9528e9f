"""A case on all of its ranks by formula: shapes, alignment, wire, memory, what refuses it; and its layouts in order.

Simulated ranks hold the formulas: real parallel and float8 code on fake tensors.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from harness.checks.traffic import VOLUME
from harness.engine.cluster import Cluster
from harness.engine.messages import Job
from harness.errors import HarnessError
from harness.expect.memory import expected_saved, is_exact
from harness.expect.traffic import expected_transfers
from harness.expect.work import executed, gemms, orthogonalized
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import case_id
from harness.matrix.dims.fsdp import Weight, fsdp_units
from harness.matrix.linears import EXPERTS, linear_name, parameter_count, shard_sizes
from harness.matrix.models import layouts
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.upstream import installed_changes
from harness.plugins.predict.cost import Memory, active_parameter_count, memory, tokens_per_device
from harness.plugins.predict.machine import (
    AxisTraffic,
    Machine,
    crosses_nodes,
    require_formulas,
    require_multiplies,
    transfers_if_balanced,
    wire,
)
from harness.plugins.predict.roofline import gemm_s, predicted_step
from harness.plugins.predict.simulated import SimulatedRank, SimulationRequest
from harness.registry import REFERENCE
from harness.studies.surviving import RanksFailed
from harness.text import binary_bytes
from harness.trace.counts import multiplied_words
from harness.verdict import Verdict

MEASURED_PEAK = 1.15  # published peaks over the lower bound
IMBALANCE = 2  # times as many rows as the mean
_ENDS = (Verdict.CRASH, Verdict.HANG)
_NAMES = 3  # of weights that a sentence lists
ASSUMPTIONS = (
    "shapes, alignment, communicated bytes, calls, and memory between forward and backward are exact for eager blocks",
    "sent_bytes assumes ring algorithms; nodes have consecutive ranks",
    "the peak of memory is a lower bound: published peaks of 8B and 70B, compiled, are 1.14 and 1.17 times as high",
    "the time of a step is a model, whose rates `predict speedup` prints",
)
EVENLY = "tokens are spread evenly over experts, so every rank multiplies, keeps and receives the mean"


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank. `rows`: that its experts get in a forward of a block, where tokens are spread evenly.

    `sent_bytes`: by all-to-all in a step, in forward, recomputation and backward. `more_s`, `more_bytes`: what a step
    takes longer, and saves more for backward, on a rank whose experts get `IMBALANCE` times as many rows; None if no
    time is predicted, or where a compiler chooses what is saved.
    """

    parameters: int
    active_parameters: int
    rows: int
    local_experts: int
    sent_bytes: int
    more_s: float | None
    more_bytes: int | None


class Reason(msgspec.Struct, frozen=True):
    """Why a case is refused, or what is to be known of it. `name`: of the rule or recorded fault."""

    name: str
    text: str


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """Equal matmuls [m, k] x [k, n] of one rank and step: of so many layers, on so many ranks of every TP group."""

    linear: str
    role: str
    m: int
    n: int
    k: int
    precision: str
    aligned: bool
    refused: bool
    layers: int = 0
    tp_ranks: int = 0


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """How a weight is sharded: its rows on TP ranks, and how FSDP2 divides the first of them.

    `padding`: share of what FSDP2 gathers and reduces. `empty_ranks`: ranks of an FSDP group that hold no row.
    """

    weight: str
    tp_rows: tuple[int, ...]
    columns: int
    fsdp_rows: tuple[int, ...]
    padding: float
    empty_ranks: int


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything predicted about a case on its ranks. `refused`: it must not be started."""

    case: str
    world_size: int
    nodes: int
    gpus_per_node: int
    device: str
    tokens: int  # of a data-parallel rank and step
    refused: tuple[Reason, ...]
    warnings: tuple[Reason, ...]
    matmuls: tuple[Matmul, ...]
    shards: tuple[Shard, ...]
    wire: tuple[AxisTraffic, ...]
    amax_reductions: int
    memory: tuple[Memory, ...]  # of the first and the last rank: no rank has more than the first
    peak_bytes: int
    device_bytes: int
    step_s: float | None  # predicted; None if the peak of the device in the dtype of the case is not known
    tokens_s: float | None  # of a device
    experts: Routed | None = None
    assumptions: tuple[str, ...] = ASSUMPTIONS

    @property
    def fits(self) -> bool:
        """Return True if the lower bound of the peak is below the memory of the device."""
        return self.peak_bytes <= self.device_bytes


def simulate(case: Case, machine: Machine, *, known: Sequence[KnownFault] = ()) -> Simulation:
    """Predict a case that no rule excludes, on all of its ranks. HarnessError for a target without formulas.

    So also for MXFP8 on a machine that does not multiply it.
    """
    require_formulas(case)
    require_multiplies(machine, case)
    ranks = dict.fromkeys((0, case.world_size - 1))
    memories = tuple(memory(case, rank=rank) for rank in ranks)
    traffic = wire(case, gpus_per_node=machine.gpus_per_node)
    multiplied, sharded = matmuls(case), shards(case)
    step_s = predicted_step(case, machine).total_s if machine.peak.tflops(case.train.dtype) else None
    return Simulation(
        case=case_id(case),
        world_size=case.world_size,
        nodes=-(-case.world_size // machine.gpus_per_node),
        gpus_per_node=machine.gpus_per_node,
        device=machine.peak.name,
        tokens=case.local_batch * case.train.seq_len,
        refused=tuple(_refusals(case, machine, memories[0], known)),
        warnings=tuple(_warnings(case, machine, memories[0], sharded, known)),
        matmuls=multiplied,
        shards=sharded,
        wire=traffic,
        amax_reductions=sum(axis.amax_reductions for axis in traffic),
        memory=memories,
        peak_bytes=memories[0].peak,
        device_bytes=machine.peak.memory_bytes,
        step_s=step_s,
        tokens_s=None if step_s is None else tokens_per_device(case, step_s),
        experts=routed(case, machine) if case.model.experts else None,
        assumptions=(*ASSUMPTIONS, EVENLY) if case.model.experts else ASSUMPTIONS,
    )


def matmuls(case: Case) -> tuple[Matmul, ...]:
    """Return the matmuls of every TP rank, those of equal shape together, by linear in order of execution."""
    ranks: Counter[Matmul] = Counter()
    for rank, alike in _distinct_tp_ranks(case).items():
        shapes = (msgspec.convert(gemm, Matmul, from_attributes=True) for gemm in gemms(case, rank=rank))
        for shape, layers in Counter(shapes).items():
            ranks[replace(shape, layers=layers)] += alike
    linears = list(dict.fromkeys(matmul.linear for matmul in ranks))
    counted = (replace(matmul, tp_ranks=count) for matmul, count in ranks.items())
    return tuple(sorted(counted, key=lambda matmul: linears.index(matmul.linear)))


def _distinct_tp_ranks(case: Case) -> Mapping[int, int]:
    """TP ranks with different shapes, and how many are like each: only shards of the vocabulary may be uneven."""
    sizes = shard_sizes(case.model.padded_vocab_size, case.layout.tp)
    return {sizes.index(size): count for size, count in Counter(sizes).items()}


def shards(case: Case) -> tuple[Shard, ...]:
    """Return how every distinct weight is sharded; blocks are alike, except the first where others have experts."""
    units = fsdp_units(case, 0)
    distinct = [unit for unit in units if not unit.name.startswith("layers.") or unit.name.split(".")[1] in ("0", "1")]
    sharded = (_shard(case, weight, unit.ranks) for unit in distinct for weight in unit.weights)
    return tuple(dict.fromkeys(sharded))


def _shard(case: Case, weight: Weight, ranks: int) -> Shard:
    rows = shard_sizes(weight.rows, ranks)
    whole_vocabulary = weight.fqn in ("tok_embeddings", "output")
    sizes = shard_sizes(case.model.padded_vocab_size, case.layout.tp) if whole_vocabulary else (weight.rows,)
    return Shard(
        weight=linear_name(weight.fqn),
        tp_rows=tuple(dict.fromkeys(sizes)),
        columns=weight.columns,
        fsdp_rows=tuple(dict.fromkeys(rows)),
        padding=1 - weight.rows / (rows[0] * ranks),
        empty_ranks=rows.count(0),
    )


def routed(case: Case, machine: Machine) -> Routed:
    rows, blocks = case.sent_rows, len(case.model.expert_layers)
    grouped = [gemm for gemm in gemms(case) if EXPERTS in gemm.fqn]
    timed = machine.peak.tflops(case.train.dtype) is not None
    received = [((times * rows,),) * blocks for times in (1, IMBALANCE)] if is_exact(case) else []
    saved = [sum(expected_saved(case, step=2, rank=0, rows=of_block).values()) for of_block in received]
    exchanged = (transfer for transfer in transfers_if_balanced(case, step=2, rank=0) if transfer.kind == "all_to_all")
    return Routed(
        parameters=parameter_count(case),
        active_parameters=active_parameter_count(case),
        rows=rows,
        local_experts=case.local_experts,
        sent_bytes=sum(transfer.payload_bytes for transfer in exchanged),
        more_s=(IMBALANCE - 1) * sum(gemm_s(gemm, machine) for gemm in grouped) if timed else None,
        more_bytes=saved[1] - saved[0] if saved else None,
    )


def _refusals(case: Case, machine: Machine, largest: Memory, known: Sequence[KnownFault]) -> Iterator[Reason]:
    ranks = case.layout.dp_shard
    if (refusal := expected_refusal(case)) is not None:
        yield Reason(refusal.name, refusal.reason)
    units = (unit for rank in _distinct_tp_ranks(case) for unit in fsdp_units(case, rank))
    gathered = [weight for unit in units for weight in unit.weights if weight.gathered_in_float8]
    if uneven := [weight for weight in gathered if weight.rows % ranks]:
        names = ", ".join(dict.fromkeys(linear_name(weight.fqn) for weight in uneven))
        text = f"the float8 all-gather sends unpadded shards, and {ranks} ranks do not divide the rows of {names}"
        yield Reason("fp8-all-gather-uneven-shards", f"{text}: https://github.com/pytorch/ao/issues/1938")
    yield from (Reason(fault.name, fault.reason) for fault in matching(known, case) if fault.verdict in _ENDS)
    if largest.certain > machine.peak.memory_bytes:
        text = f"a rank keeps {binary_bytes(largest.certain)} between forward and backward, or behind it"
        yield Reason("memory", f"{text}, more than {machine.peak.name} has")


def _warnings(
    case: Case, machine: Machine, largest: Memory, sharded: Sequence[Shard], known: Sequence[KnownFault]
) -> Iterator[Reason]:
    yield from (Reason(fault.name, fault.reason) for fault in matching(known, case) if fault.verdict not in _ENDS)
    if case.layout.tp > 1 and crosses_nodes(case.layout, "tp", machine.gpus_per_node):
        yield Reason("tp-between-nodes", "TP groups span several nodes, and nothing overlaps their communication")
    if empty := [shard for shard in sharded if shard.empty_ranks]:
        most = max(shard.empty_ranks for shard in empty)
        names = ", ".join(shard.weight for shard in empty[:_NAMES])
        more = f" and {len(empty) - _NAMES} more" if len(empty) > _NAMES else ""
        text = f"up to {most} of {case.layout.dp_shard} ranks of an FSDP group hold no row of {names}{more}"
        yield Reason("empty-shards", f"{text}, and gather and reduce padding")
    if largest.certain <= machine.peak.memory_bytes < largest.peak * MEASURED_PEAK:
        text = f"the device has less than {MEASURED_PEAK} times the peak, and published peaks are that high or higher"
        yield Reason("peak-memory", text)


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. Without numbers, 0, where a rule excludes it; times are 0 where they are not predicted too.

    `sent_bytes`: of a rank and step; `between_nodes_bytes`: of them those along axes that leave a node.
    """

    case: str
    layout: Layout
    refused: tuple[Reason, ...]
    warnings: tuple[Reason, ...] = ()
    fits: bool = False
    peak_bytes: int = 0
    sent_bytes: int = 0
    between_nodes_bytes: int = 0
    step_s: float = 0.0
    tokens_s: float = 0.0


def sweep(case: Case, machine: Machine, *, known: Sequence[KnownFault] = ()) -> tuple[Ranked, ...]:
    """Every layout of the ranks of a case for its global batch; what does not fit, then what is refused, comes last."""

    def order(ranked: Ranked) -> tuple[object, ...]:
        return bool(ranked.refused), not ranked.fits, ranked.step_s, ranked.peak_bytes, ranked.sent_bytes

    return tuple(sorted((_ranked(candidate, machine, known) for candidate in layouts(case)), key=order))


def _ranked(case: Case, machine: Machine, known: Sequence[KnownFault]) -> Ranked:
    if rules := exclusions(case):
        reasons = tuple(Reason(rule.name, rule.reason) for rule in rules)
        return Ranked(case=case_id(case), layout=case.layout, refused=reasons)
    simulation = simulate(case, machine, known=known)
    return Ranked(
        case=case_id(case),
        layout=case.layout,
        refused=simulation.refused,
        warnings=simulation.warnings,
        fits=simulation.fits,
        peak_bytes=simulation.peak_bytes,
        sent_bytes=sum(axis.sent_bytes for axis in simulation.wire),
        between_nodes_bytes=sum(axis.sent_bytes for axis in simulation.wire if axis.crosses_nodes),
        step_s=simulation.step_s or 0.0,
        tokens_s=simulation.tokens_s or 0.0,
    )


PROGRAM = "harness.plugins.predict.worker.main"
_DEADLINE_S = 1800.0
_EXACT = ("parameters", "buffers", "optimizer", "gradients", "saved", "before_backward")
_SCALAR_BYTES = 8


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A number of one rank in step 2, by formula and as it was found."""

    rank: int
    what: str
    formula: int
    found: int
    slack: int = 0  # how far apart they may be
    known: str = ""  # the recorded fault that explains a difference

    @property
    def differs(self) -> bool:
        """Return True if they are further apart, and no recorded fault explains it."""
        return abs(self.formula - self.found) > self.slack and not self.known


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared. `peaks`: of every rank, found over the lower bound of the formula, which is not compared."""

    ranks: tuple[int, ...]
    compared: tuple[Compared, ...]
    peaks: tuple[float, ...]
    seconds: float

    @property
    def differing(self) -> tuple[Compared, ...]:
        return tuple(row for row in self.compared if row.differs)


def require_simulable(case: Case) -> None:
    """HarnessError for a case whose steps the simulated ranks do not take."""
    other = {
        "target": case.target != REFERENCE,
        "evaluate": case.train.evaluate,
        "ignored_tokens": case.train.ignored_tokens != "none",
        "packing": case.train.packing != "none",
        "max_norm": case.train.max_norm is not None,
        "experts": case.model.experts > 0,
    }
    for axis in (name for name, stands in other.items() if stands):
        what = f"simulated ranks train the reference Llama with a plain step, which ignores {axis}."
        raise HarnessError(what, where=case_id(case), fix="leave out --verify, or give a case with the default.")


def verify(engine: Cluster, case: Case, ranks: Sequence[int], known: Sequence[KnownFault] = ()) -> Verification:
    """Simulate some ranks of a case, eager, and compare all that its formulas say exactly.

    Raises RanksFailed where a rank ends in another error than a refused matmul.
    """
    case = replace(case, compile="none", layout=replace(case.layout, async_tp=False))
    require_simulable(case)
    started = time.perf_counter()
    simulated = _simulated(engine, case, ranks)
    rows = [row for rank in simulated for row in _compared(case, rank)]
    bounds = [memory(case, rank=rank, saves_attention=False).peak for rank in ranks]
    return Verification(
        ranks=tuple(ranks),
        compared=tuple(_explained(row, matching(known, case)) for row in rows),
        peaks=tuple(rank.memory["peak"] / bound for rank, bound in zip(simulated, bounds, strict=True) if rank.memory),
        seconds=time.perf_counter() - started,
    )


def _simulated(engine: Cluster, case: Case, ranks: Sequence[int]) -> list[SimulatedRank]:
    payload = msgspec.msgpack.encode(SimulationRequest(case=case, ranks=tuple(ranks)))
    outcome = engine.run(Job(job_id="simulate", world_size=len(ranks), payload=payload, deadline_s=_DEADLINE_S))
    if outcome.status != "ok":
        what = f"the simulated ranks ended in an error: {outcome.message}"
        raise RanksFailed(what, where=case_id(case), fix="predict it without --verify, and report this.")
    return [msgspec.msgpack.decode(rank.payload or b"", type=SimulatedRank) for rank in outcome.ranks]


def _compared(case: Case, simulated: SimulatedRank) -> Iterator[Compared]:
    refusal = expected_refusal(case)
    if refusal is not None or simulated.refusal:
        as_told = refusal is None or re.search(refusal.pattern, simulated.refusal) is not None
        yield Compared(rank=simulated.rank, what="refusals", formula=int(refusal is not None), found=int(as_told))
        return
    formula, seen = _formulas(case, simulated.rank), _seen(simulated)
    for words in sorted({*formula, *seen}):
        yield Compared(rank=simulated.rank, what=words, formula=formula[words], found=seen[words])
    yield from _memory(case, simulated)


def _formulas(case: Case, rank: int) -> Counter[str]:
    """Return the calls and bytes of collectives, matmuls by shape, and FLOPs, in words."""
    wanted: Counter[str] = Counter()
    for term in expected_transfers(case, step=2, rank=rank, changes=installed_changes()):
        wanted[f"calls of {term.words}"] += term.times
        wanted[f"bytes of {term.words}"] += term.payload_bytes
    for gemm in gemms(case, rank=rank):
        wanted[_shape_words(gemm.precision, gemm.m, gemm.n, gemm.executed_k)] += gemm.executions
    for sizes in orthogonalized(case, rank=rank):
        wanted[_shape_words("bfloat16", *sizes)] += 1
    for words, multiplied in executed(case, rank=rank, saves_attention=False).items():
        wanted[f"FLOPs of {words}"] = multiplied.flops
    return wanted


def _seen(simulated: SimulatedRank) -> Counter[str]:
    seen: Counter[str] = Counter()
    for record in simulated.traffic:
        seen[f"calls of {record.words}"] += sum(record.sizes.values())
        seen[f"bytes of {record.words}"] += record.payload_bytes
    for matmul in simulated.matmuls:
        seen[_shape_words(matmul.precision, matmul.m, matmul.n, matmul.k)] = matmul.calls
    for part in simulated.flops:
        seen[f"FLOPs of {multiplied_words(part=part.part, precision=part.precision)}"] = part.flops
    return seen


def _shape_words(precision: str, m: int, n: int, k: int) -> str:
    return f"matmuls [{m}, {k}] x [{k}, {n}] in {precision}"


def _memory(case: Case, simulated: SimulatedRank) -> Iterator[Compared]:
    wanted = memory(case, rank=simulated.rank, saves_attention=False)
    weights = [weight for unit in fsdp_units(case, simulated.rank) for weight in unit.weights]
    scalars = _SCALAR_BYTES * (2 + 2 * sum(weight.gathered_in_float8 for weight in weights))
    for name in _EXACT:
        words = f"bytes of {'all between forward and backward, scalars apart' if name == 'before_backward' else name}"
        slack = scalars if name == "before_backward" else 0
        formula = getattr(wanted, name)
        yield Compared(rank=simulated.rank, what=words, formula=formula, found=simulated.memory[name], slack=slack)


def _explained(row: Compared, faults: Sequence[KnownFault]) -> Compared:
    collective = _collective_of(row.what.partition(" of ")[2])
    if not row.differs or collective is None:
        return row
    finding = VOLUME.finding(values=collective)
    fault = next((fault for fault in faults if fault.explains(finding)), None)
    return row if fault is None else replace(row, known=fault.name)


_WORDS = re.compile(r"(?P<kind>\w+)(?: \((?P<op>\w+)\))? in (?P<dtype>\w+) along (?P<axis>\w+(?:\+\w+)*)", re.ASCII)


def _collective_of(words: str) -> Mapping[str, str] | None:
    """Return the arguments of `collective_words` that give these words; None if none do."""
    match = _WORDS.fullmatch(words)
    return None if match is None else match.groupdict(default="")
