"""Does every rank update its parameters in every step, with the options and dtypes of one rank, as its optimizer says?

Steps of which no module is repeated are checked by this alone where numbers may drift apart.
"""

import itertools
from collections.abc import Iterable, Mapping

from harness.checks.check import Rule, Rules, Stage, Witnesses, finished, merge_ranks
from harness.matrix.case import Case
from harness.matrix.layout import STAGE_AXES, peers
from harness.promises import Limit, keeps
from harness.trace import RankTrace, Run
from harness.verdict import Finding, Value

# An update is not lost in the rounding of a parameter in these, where its gradient is above this part of the largest.
WIDE = ("float32", "float64")
WORTH_AN_UPDATE = Limit("updates.worth_one")

_ROUNDINGS = Limit("updates.roundings")

_rule = Rules("updates", Stage.MODEL)
NO_UPDATE = _rule(
    "no-update",
    "no optimizer updates {what}",
    fix="pass every parameter to one optimizer on every rank, and call its step() in every step.",
)
UNMOVED = _rule(
    "unmoved",
    "the optimizer steps, but {what} does not change",
    fix="step the optimizer with the parameters of `model`, and do not set them back.",
)
OPTION = _rule(
    "option",
    "{name} of the optimizer of {module} is {here}, not {there} ({count:n such parameter})",
    key=("name",),
    fix="give the optimizer the same options, and the same dtypes, on every rank and in every layout.",
)
FORMULA = _rule(
    "formula",
    "{what} of {module} is {distance:.3g} roundings away from the optimizer's formula",
    fix="let torch's optimizer do the update, and do not edit its state.",
)

_Options = Mapping[str, Mapping[str, str]]  # of every parameter that has a gradient and is updated


@_rule.judged_by(
    blind="Bugs that one rank shares; optimizers other than Adam, AdamW and SGD; updates of Muon; values not sampled.",
    also_reads=("sketches",),
    unasked="model",
    absent="it is not known what the ranks built",
)
def check_updates(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is every parameter updated as on one rank, in every step, and as the formula of its optimizer says?"""
    reference = finished(witnesses.solo)
    made = {trace.rank: (_options(trace), *_moved(trace)) for trace in run.by_rank}
    one_rank = [(_options(trace), *_moved(trace)) for trace in (() if reference is None else reference.traces[:1])]

    def of_rank(trace: RankTrace) -> Iterable[Finding]:
        record = trace.model
        if record is None:
            return
        first = peers(case.layout, trace.rank, STAGE_AXES)[0]
        (theirs, moves, _), who = (one_rank[0], "one rank") if one_rank else (made[first], f"rank {first}")
        options, moved, unmoved = made[trace.rank]
        held = {parameter.fqn for parameter in record.parameters if parameter.local_elements}
        for step, mine in enumerate(options, 1):
            wanted = theirs[step - 1] if len(theirs) >= step else {}
            lost = [name for name in wanted if name in held - mine.keys()]
            still = sorted(fqn for at, fqn in (unmoved - moved) & moves if at == step)
            yield from _not_done(NO_UPDATE, step, lost, f"an update, as on {who}", "" if mine else "any parameter")
            yield from _other_options(step, mine, wanted, who)
            yield from _not_done(UNMOVED, step, still, f"a change, as on {who}")
            update = record.updates[step - 1]
            if not keeps(update.distance, _ROUNDINGS):  # NaN is wrong
                what, distance = "the new value" if update.what == "param" else update.what, update.distance
                expected, found = f"at most {_ROUNDINGS:g} roundings", f"{distance:.3g}"
                numbers: dict[str, Value] = {"what": what, "distance": distance}
                yield FORMULA.finding(
                    step=update.step, module=update.fqn, expected=expected, found=found, size=distance, values=numbers
                )

    found = merge_ranks(run, lambda trace: tuple(itertools.islice(of_rank(trace), 1)))
    return sorted(found, key=lambda finding: (finding.step or 0, -(finding.size or 0.0)))[:1]


def _options(trace: RankTrace) -> list[_Options]:
    """Return the options of every step; a step in which they are those of the one before has none recorded."""
    steps: list[_Options] = []
    for update in trace.model.updates if trace.model is not None else ():
        given = {name: group.values for group in update.options for name in group.names}
        steps.append(given or (steps[-1] if steps and update.updated else {}))
    return steps


def _moved(trace: RankTrace) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """Return, by step and FQN, the wide parameters that an update changed in part, and those with an unchanged part.

    Only where the gradient of that part is large enough, or nothing can be told by it.
    """
    digests: dict[tuple[str, tuple[int, ...]], str] = {}
    moved, unmoved = set[tuple[int, str]](), set[tuple[int, str]]()
    wide = {parameter.fqn for parameter in trace.model.parameters if parameter.dtype in WIDE} if trace.model else ()
    sketches = [sketch for sketch in trace.sketches or () if sketch.fqn in wide]
    grads = {
        (sketch.step, sketch.fqn, sketch.offset): sketch.norm_squared for sketch in sketches if sketch.kind == "grad"
    }
    worth = WORTH_AN_UPDATE**2 * max(grads.values(), default=0.0)
    for sketch in sketches:
        place = sketch.fqn, sketch.offset
        if sketch.kind == "param" and place in digests and grads.get((sketch.step, *place), 0.0) > worth:
            (unmoved if digests[place] == sketch.digest else moved).add((sketch.step, sketch.fqn))
        if sketch.kind != "grad":
            digests[place] = sketch.digest
    return moved, unmoved


def _not_done(rule: Rule, step: int, fqns: list[str], expected: str, every: str = "") -> Iterable[Finding]:
    """Yield what these parameters lack, of which the first is named, or `every` in their place."""
    if fqns:
        module, more = None if every else fqns[0], f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
        yield rule.finding(step=step, module=module, expected=expected, found="none", what=every or fqns[0] + more)


def _other_options(step: int, mine: _Options, wanted: _Options, who: str) -> Iterable[Finding]:
    names = mine.keys() & wanted.keys()
    wrong = sorted(
        (of, name) for name in names for of, text in mine[name].items() if wanted[name].get(of, text) != text
    )
    for of, name in wrong[:1]:
        here, there, count = mine[name][of], wanted[name][of], sum(other == of for other, _ in wrong)
        values: dict[str, Value] = {"name": of, "here": here, "there": there, "count": count}
        yield OPTION.finding(step=step, module=name, expected=f"{there}, as on {who}", found=here, values=values)
