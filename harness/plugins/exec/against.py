"""A script beside itself on one rank: losses, gradients and updates of its first steps, with the promises of `parity`.

Every step of both begins from the same weights, so each is compared by itself. Gradients differ by what rounds: a part
of each rank, and their sum. What could not be lined up is named, and then nothing is called equal.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.checks.assembly import Assembled, SketchKey, assemble, nan_as_inf, relative_distances, unequal_replicas
from harness.checks.check import Rule
from harness.checks.comparison import Compared, first_wrong
from harness.checks.parity import FLOAT32_LOSS, GRADIENTS, LOSS, PARAMETERS, REPLICAS
from harness.engine.node import Scratch
from harness.headline import headline_of
from harness.plugins.exec.request import ExecRequest, OneRankRecord
from harness.plugins.exec.supervise import Bounds, Outcome, run
from harness.promises import Limit
from harness.report.sections import Table, text_of
from harness.text import format_ranks
from harness.verdict import Finding, Value

Tensors = Mapping[SketchKey, Assembled]
_BY_CHANCE = 2  # elements
_CASTS = 2  # in a row that round every value to its other neighbor: half of one was measured with 14 linears
_SAME_FACTOR = Limit("factors.close")


class Row(NamedTuple):
    """One step: the losses of both, and how far off the worst gradient and update are, with their names."""

    step: int
    loss: float
    one_rank: float
    gradient: tuple[float, str]
    update: tuple[float, str]


class Against(NamedTuple):
    """What came of it. `not_compared`: what was not lined up, by name; empty where everything was."""

    rows: Sequence[Row]
    allowed: float
    findings: Sequence[Finding]
    not_compared: Mapping[str, str]

    @property
    def verdict(self) -> str:
        if self.findings:
            return "wrong"
        return "not compared" if self.not_compared else "equal"

    def table(self) -> Table:
        """Return a row for every step; distances relative to the norm of what one rank has."""
        worst = [[f"{far:.2g} {name}" for far, name in row[3:]] for row in self.rows]
        rows = [
            (f"{one.step}", f"{one.loss:.5f}", f"{one.one_rank:.5f}", *far)
            for one, far in zip(self.rows, worst, strict=True)
        ]
        columns = ("step", "loss", "one rank", "worst gradient", "worst update")
        return Table(columns=columns, rows=tuple(rows), right=(0, 1, 2))


def read(folder: Path) -> list[OneRankRecord]:
    """Return what the ranks of a run recorded."""
    files = folder.glob("lineup-*.msgpack")
    records = (msgspec.msgpack.decode(file.read_bytes(), type=OneRankRecord) for file in files)
    return sorted(records, key=lambda record: record.rank)


def compare(ranks: Sequence[OneRankRecord], one: OneRankRecord) -> Against:
    """Compare the steps that both took."""
    sides, of_ranks = assemble([one]), assemble(_once(ranks))
    steps = range(1, 1 + min(len(one.losses), *(len(record.losses) for record in ranks)))
    dtype = one.dtype if one.dtype in ("bfloat16", "float32", "float64") else "bfloat16"
    allowed = Limit(f"modules.{dtype}", math.sqrt(1 + one.batches))
    if dtype == "bfloat16" and ranks[0].shares_linears:  # they round partial sums before these are cast
        allowed = Limit("code.step_float8_e4m3fn", _CASTS)
    of_vectors = max(allowed, Limit(f"modules.{dtype}", math.sqrt(1 + max(one.tokens, one.batches))))
    of_gradients = functools.partial(_allowed_of_gradient, allowed, of_vectors)
    of_updates = functools.partial(_allowed_of_update, allowed)
    rows, compared = [], list[Compared]()
    for step in steps:
        loss = math.fsum(record.losses[step - 1] for record in ranks) / len(ranks)
        expected = one.losses[step - 1]
        compared.append(_loss(step, loss, expected, allowed, one.loss_dtype))
        gradients = _beside(GRADIENTS, _of(of_ranks, step, "grad"), _of(sides, step, "grad"), of_gradients)
        updates = _beside(PARAMETERS, _changes(of_ranks, step), _changes(sides, step), of_updates)
        compared += (*gradients, *updates)
        rows.append(Row(step, loss, expected, _worst(gradients), _worst(updates)))
    lost = dict(one.not_lined_up) | {name: why for record in ranks for name, why in record.not_lined_up.items()}
    if not any(key.kind == "grad" for key in sides):
        lost["gradients"] = "one rank has none"
    if len(ranks) < ranks[0].world_size:
        lost["ranks"] = f"only {format_ranks([record.rank for record in ranks])} took a step of an optimizer"
    findings = [] if lost else [*_findings(compared, ranks)]
    return Against(rows, allowed, [*([] if "the forward" in lost else _replicas(ranks)), *findings], lost)


def _once(ranks: Sequence[OneRankRecord]) -> Iterator[OneRankRecord]:
    """Yield the records without what several ranks hold alike, but for the first of them."""
    seen = set[tuple[object, ...]]()
    for record in ranks:
        held = {(one.step, one.kind, one.fqn, one.offset, one.local_shape): one for one in record.sketches}
        mine = [msgspec.structs.replace(one, owner=True) for place, one in held.items() if place not in seen]
        seen.update(held)
        yield msgspec.structs.replace(record, sketches=tuple(mine))


def _loss(step: int, loss: float, expected: float, allowed: float, dtype: str) -> Compared:
    rounding = Limit("parity.other_dtype", abs(expected)) if dtype in ("bfloat16", "float16") else FLOAT32_LOSS
    most = max(Limit("parity.loss_share", allowed), rounding)
    return Compared(LOSS, step, abs(loss - expected), most, expected=repr(expected), found=repr(loss))


def _beside(rule: Rule, found: Tensors, expected: Tensors, allowed: Callable[[Assembled], float]) -> list[Compared]:
    """Compare tensors with those of one rank; what is left of terms that cancel is no distance."""
    ignored = Limit("parity.cancelled_bfloat16") if rule is GRADIENTS else 0.0
    far = dict.fromkeys(expected, math.inf) | relative_distances(found, expected, ignored=ignored)
    return [
        Compared(rule, key.step, far[key], allowed(tensor), key.fqn, key.kind, of=(found.get(key), tensor))
        for key, tensor in expected.items()
    ]


def _of(side: Tensors, step: int, kind: str) -> Tensors:
    return {key: tensor for key, tensor in side.items() if (key.step, key.kind) == (step, kind)}


def _changes(side: Tensors, step: int) -> Tensors:
    """Return what a step added to each parameter."""
    before = {key._replace(kind="param"): tensor for key, tensor in _of(side, step, "initial").items()}
    made = {}
    for key, after in _of(side, step, "param").items():
        if key in before:
            sums = tuple(now - then for now, then in zip(after.sums, before[key].sums, strict=True))
            made[key] = after._replace(sums=sums, norm=math.hypot(*sums) / math.sqrt(len(sums)))
    return made


def _allowed_of_gradient(allowed: float, of_vectors: float, tensor: Assembled) -> float:
    """A gradient of a vector is a sum over tokens, which torch's layer norm rounds after each on a CPU."""
    return of_vectors if len(tensor.shape) < 2 else allowed


def _allowed_of_update(allowed: float, tensor: Assembled) -> float:
    """AdamW begins with the sign of a gradient: an element that is no larger than its rounding may go the other way.

    These are as many as the gradient is allowed to be off, and some of a small tensor by chance.
    """
    return 2 * math.sqrt(max(allowed, _BY_CHANCE / max(tensor.elements, 8 * _BY_CHANCE)))


def _worst(compared: Sequence[Compared]) -> tuple[float, str]:
    worst = max(compared, key=lambda one: nan_as_inf(one.distance), default=None)
    return (math.nan, "") if worst is None else (worst.distance, worst.module or "")


def _findings(compared: Sequence[Compared], ranks: Sequence[OneRankRecord]) -> Iterator[Finding]:
    """Yield what is too far off in the first step where something is: the loss, gradients, updated parameters."""
    wrong = [one for one in compared if not one.good]
    first = min((one.step for one in wrong), default=0)
    for rule, noun in ((GRADIENTS, "gradients"), (LOSS, ""), (PARAMETERS, "updates of parameters")):
        of_rule = [one for one in compared if one.rule is rule and one.step == first]
        told = first_wrong(of_rule, worst=True)
        if told is None:
            continue
        if rule is LOSS:
            yield told.finding(number="loss")
            continue
        found, expected = told.told.of or (None, None)
        norms: dict[str, Any] = {
            "norm": getattr(found, "norm", math.nan),
            "reference": getattr(expected, "norm", math.nan),
        }
        what, fix = _cause(of_rule, noun, [record.labels[first - 1 : first] for record in ranks])
        yield told.finding(noun=noun, notes=[what] if what else [], fix=fix, **norms)
        return


def _cause(compared: Sequence[Compared], noun: str, labels: Sequence[tuple[int, ...]]) -> tuple[str, str | None]:
    """Say by which number they are off, where all are by one that follows from the number of ranks; and the way on.

    `labels`: how many each rank has.
    """
    ranks, of_gradients = len(labels), compared[0].rule is GRADIENTS
    pairs = [one.of for one in compared if not one.good and one.of and one.of[0]]
    of_lr = "the learning rate depends on the number of ranks", "give the optimizer the same lr on any number of ranks."
    for times, *of_grad in (
        (ranks, "summed over ranks, not averaged", f"divide them, or the loss, by {ranks} once."),
        (1 / ranks, "averaged once too often", f"FSDP2 and DDP average already: do not divide by {ranks} again."),
    ):
        scaled = [math.isclose(found.norm, times * right.norm, rel_tol=_SAME_FACTOR) for found, right in pairs]
        if scaled and ranks > 1 and all(scaled):
            size, (why, fix) = f"{ranks} times" if times > 1 else f"1/{ranks} of", of_grad if of_gradients else of_lr
            return f"{len(scaled)} of {len(compared)} {noun} are {size} the values on one rank: {why}", fix
    if of_gradients and len(set(labels)) > 1:
        counts = ", ".join(str(sum(count)) for count in labels)
        fix = "divide the sum of each rank by the labels of all ranks (all_reduce them first), times their number."
        return f"ranks have {counts} labels, and the mean of their means is not the mean over all", fix
    return "", None


def _replicas(ranks: Sequence[OneRankRecord]) -> Iterator[Finding]:
    unequal = unequal_replicas(ranks)
    for key, offset, digests in unequal[:1]:
        values: dict[str, Value] = {"kind": key.kind, "offset": str(offset), "count": len(unequal)}
        yield REPLICAS.finding(step=key.step, module=key.fqn, ranks=digests, values=values)


def run_both(request: ExecRequest, bounds: Bounds) -> tuple[Outcome, Against | None]:
    """Run a command, and again on one rank; None where it failed by itself. The second run prints nothing."""
    scratch, other = Scratch(), Scratch()
    try:
        outcome = run(msgspec.structs.replace(request, keep_inputs=str(scratch.path)), bounds)
        if outcome.exit_code or outcome.ended_for:
            return outcome, None
        ranks = read(scratch.path)
        alone = msgspec.structs.replace(
            request, ranks=1, nodes=1, watch=False, injections=(), keep_inputs=str(other.path), inputs=str(scratch.path)
        )
        of_one = run(alone, bounds, quiet=True)
        if of_one.exit_code or of_one.ended_for:
            why = of_one.ended_for or next((each.ended for each in of_one.records if each.ended), "it failed")
            return outcome, Against((), 0.0, (), {"one rank": why})
        one = read(other.path)
        if not ranks or not one:
            return outcome, Against((), 0.0, (), {"the model": "no module is called that has all that is trained"})
        return outcome, compare(ranks, one[0])
    finally:
        scratch.close()
        other.close()


def lines(against: Against) -> Iterator[str]:
    """Yield what is printed of it."""
    if against.not_compared.keys().isdisjoint(("weights", "the forward", "the model", "one rank")):
        yield from text_of([against.table()]).splitlines()
    allowed = f"; gradients may be {float(against.allowed):.2g} off" if against.rows else ""
    yield f"exec: beside one rank: {against.verdict}{allowed}"
    for name, why in against.not_compared.items():
        yield f"exec: not lined up: {name}: {why}"
    if against.findings:
        yield from (f"exec: {text}" for text in headline_of(against.findings, command="", ranks=1).texts)
