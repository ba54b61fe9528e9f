"""Holds the formulas of a case against simulated ranks: real parallel and float8 code on fake tensors."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from harness.checks.traffic import VOLUME
from harness.engine.cluster import Cluster
from harness.engine.messages import Job
from harness.errors import HarnessError
from harness.expect.traffic import expected_transfers
from harness.expect.units import fsdp_units
from harness.expect.upstream import installed_changes
from harness.expect.work import executed, gemms
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import expected_refusal
from harness.plugins.predict.memory import memory
from harness.registry import REFERENCE
from harness.request import SimulationRequest
from harness.studies.surviving import RanksFailed
from harness.trace.counts import SimulatedRank, collective_of, multiplied_words

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
        """True where they are farther apart, and no recorded fault explains it."""
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
        "max_norm": case.train.max_norm is not None,
        "experts": case.model.experts > 0,
    }
    for axis in (name for name, stands in other.items() if stands):
        what = f"simulated ranks train the reference Llama by its plain step, which has no {axis} of its own."
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
    """Calls and bytes of collectives, matmuls by shape, and FLOPs, in words."""
    wanted: Counter[str] = Counter()
    for term in expected_transfers(case, step=2, rank=rank, changes=installed_changes()):
        wanted[f"calls of {term.words}"] += term.times
        wanted[f"bytes of {term.words}"] += term.payload_bytes
    for gemm in gemms(case, rank=rank):
        wanted[_shape_words(gemm.precision, gemm.m, gemm.n, gemm.executed_k)] += gemm.executions
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
    collective = collective_of(row.what.partition(" of ")[2])
    if not row.differs or collective is None:
        return row
    finding = VOLUME.finding(values=collective)
    fault = next((fault for fault in faults if fault.explains(finding)), None)
    return row if fault is None else replace(row, known=fault.name)
