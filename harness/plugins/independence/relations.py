"""The relations, what a recipe promises of each, what a rank found, and the rules that it breaks.

A relation replaces tokens and looks at the others. No two tokens may meet but in attention, so what a module returns
for a token that is left alone must keep its bits, unless the recipe has one scale for several tokens: then it moves by
roundings, and the number is only shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from harness.checks.assembly import largest
from harness.checks.check import Rules, Stage
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.trace.record import Record
from harness.verdict import Finding

Relation = Literal["later token", "other sequence", "other microbatch", "padding"]
RELATIONS: tuple[Relation, ...] = ("later token", "other sequence", "other microbatch", "padding")
GRADIENTS = "padding, gradients"  # the column beside that of its logits
_ALWAYS: tuple[Relation, ...] = ("other microbatch",)  # dynamic scales are of one forward pass

_rule = Rules("independence", Stage.VALUES, located=True)
_CHANGES = "{relation} changes "
SCALE = _rule(
    "scale",
    _CHANGES + "what {module} returns for the same input: its scale is not of this token alone",
    stage=Stage.SCALES,
    numeric=True,
)
EXPERTS = _rule(
    "experts", _CHANGES + "what {module} returns for the same tokens: routing, a capacity or a group", numeric=True
)
MODULE = _rule("module", _CHANGES + "what {module} returns for the same input", numeric=True)
BETWEEN = _rule(
    "between",
    _CHANGES + "the input of {module}, and no module before it: the mask of attention, or what ranks exchange there",
    stage=Stage.COLLECTIVES,
    numeric=True,
)
LOSS = _rule("loss", _CHANGES + "the loss by {moved:.2g} nats, and no logits", stage=Stage.STEP, numeric=True)
OF_GRADIENTS = _rule("gradients", _CHANGES + "the gradient of {module}", stage=Stage.STEP, numeric=True)
NUMBER = _rule("number", "{relation}: {module} returns values that are not finite", stage=Stage.NONFINITE, numeric=True)
NOT_REPLACED = _rule("not-replaced", "{relation} was replaced, and no module returned another value", stage=Stage.RUN)
NOT_COMPARED = _rule("not-compared", "{relation}: no module returned anything for tokens that stay", stage=Stage.RUN)
RULES = _rule.declared


class Moved(Record, frozen=True, kw_only=True):
    """What one rank found of one relation. Distances are relative, over the tokens that stay.

    `first`: the module that moved first. `of`: a converted linear ("scale"), experts, another module, or "between"
    where its input moved.
    """

    relation: Relation
    why: str = ""  # nothing was compared
    compared: int = 0  # modules with tokens that stay
    replaced: bool = False  # some module returned another value for a token that was replaced
    output: float = 0.0  # of the last module
    first: str = ""
    of: Literal["", "scale", "experts", "module", "between"] = ""
    distance: float = 0.0  # of the first
    loss: float = 0.0  # in nats
    gradients: float = 0.0
    gradient: str = ""  # the parameter whose gradient moved most
    state: tuple[str, ...] = ()  # saved buffers that a step left otherwise: the balance of experts counts every token


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case. `moved`: by relation, over all ranks. `failed`: why its ranks did not finish."""

    case_id: str
    recipe: str
    promised: Mapping[str, bool]
    moved: Mapping[str, Moved] = {}
    findings: tuple[Finding, ...] = ()
    failed: str = ""


def promised(case: Case) -> dict[str, bool]:
    """Return which relations keep every bit, by the casts of the recipe."""
    kinds = (case.float8.traits, *([case.float8.grouped_traits] if case.model.experts else []))
    apart = all(traits.keeps_tokens_apart("forward") for traits in kinds)
    of_gradients = apart and all(traits.keeps_tokens_apart("wgrad") for traits in kinds)
    return {**{relation: apart or relation in _ALWAYS for relation in RELATIONS}, GRADIENTS: of_gradients}


def judged(case: Case, ranks: Sequence[Sequence[Moved]]) -> Row:
    """Return the row of a case from what each of its ranks found."""
    by_relation = {of[0].relation: of for of in zip(*ranks, strict=True)}
    row = Row(case_id=case_id(case), recipe=case.float8.recipe, promised=promised(case))
    moved = {relation: _of_all_ranks(of) for relation, of in by_relation.items()}
    findings = [
        replace(finding, ranks=tuple(rank for rank, one in enumerate(of) if one.of or one.gradient))
        for relation, of in by_relation.items()
        for finding in _findings(moved[relation], row.promised)
    ]
    return replace(row, moved=moved, findings=tuple(_joined(findings)))


def _of_all_ranks(of: Sequence[Moved]) -> Moved:
    """Return the first module of the lowest rank where one moved, and the largest numbers of all."""
    first = next((one for one in of if one.of), of[0])
    worst = max(of, key=lambda one: largest([one.gradients]))
    return replace(
        first,
        why=next((one.why for one in of), "") if all(one.why for one in of) else "",
        compared=sum(one.compared for one in of),
        replaced=any(one.replaced for one in of),
        output=largest([one.output for one in of]),
        loss=largest([one.loss for one in of]),
        gradients=worst.gradients,
        gradient=worst.gradient,
        state=tuple(sorted({name for one in of for name in one.state})),
    )


def _findings(moved: Moved, promises: Mapping[str, bool]) -> Iterator[Finding]:
    relation = _WORDS[moved.relation]
    if moved.why:
        return
    if not moved.compared:
        yield NOT_COMPARED.finding(relation=relation)
    elif not moved.replaced:
        yield NOT_REPLACED.finding(relation=relation)
    if not all(number < float("inf") for number in (moved.output, moved.distance, moved.gradients, moved.loss)):
        yield NUMBER.finding(relation=relation, module=moved.first or moved.gradient or "a module")
    elif promises[moved.relation] and moved.of:
        rule = {"scale": SCALE, "experts": EXPERTS, "module": MODULE, "between": BETWEEN}[moved.of]
        shown = f"{moved.distance:.2g} of the first, {moved.output:.2g} of what the rank returns last"
        yield rule.finding(
            relation=relation,
            step=1,
            module=moved.first,
            operand="input in forward" if moved.of in ("scale", "between") else "",
            expected="the same bits",
            found=shown,
            size=moved.distance,
        )
    elif promises[moved.relation] and moved.loss:
        yield LOSS.finding(relation=relation, moved=moved.loss, step=1)
    elif moved.relation == "padding" and promises[GRADIENTS] and moved.gradient:
        yield OF_GRADIENTS.finding(relation=relation, module=moved.gradient, step=1, size=moved.gradients)


_WORDS: Mapping[Relation, str] = {
    "later token": "a later token",
    "other sequence": "another sequence of the microbatch",
    "other microbatch": "another microbatch",
    "padding": "padding",
}


def _joined(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings by the same rule in the same module once, with all relations; those nearest to a cause first."""
    stages = {rule.name: rule.stage.place for rule in RULES}
    groups: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: stages[finding.rule]):
        groups.setdefault((finding.rule, finding.module), []).append(finding)
    for first, *others in groups.values():
        names = ", ".join(str(finding.values["relation"]) for finding in (first, *others))
        yield replace(first, values={**first.values, "relation": names})
