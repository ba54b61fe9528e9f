"""Rules: the ways in which a check can find something wrong. Each is declared in the file of its check."""

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from harness.verdict import Finding, Value, Verdict, check_of


class Stage(enum.Enum):
    """How near to the cause findings are, the nearest first. The value says why, for those of the next stage."""

    RUN = "without all ranks and steps nothing is complete"
    DATA = "of other tokens or weights every number is another"
    MODEL = "what is not converted, checkpointed, sharded or compiled as asked casts, sends and keeps something else"
    SCALES = "a scale decides the float8 values that are made with it; a missing amax reduction shows in the scale too"
    VALUES = "values saturate or differ where a scale is wrong; alone they are the fault of the cast or of the matmul"
    COLLECTIVES = "what ranks send decides what they compute next"
    EXECUTION = "how a result is computed decides its numbers"
    # From here on: what is wrong because something else is, or the only sign of a fault that no rule above describes.
    MODULE = "it had the right operands"
    OPERAND = "it names the module behind the fault"
    NO_NUMBER = "gradients of a loss that is no number are no numbers either"
    MEMORY = "what is kept for too long may be used again"
    STEP = "each rank alone contradicts itself"
    SAME_LAYOUT = "it is compared with the same layout, so little else explains a difference"
    ONE_RANK = "it is compared with one rank in FP8, so the layout explains a difference too"
    BF16 = "it is compared with BF16: everything may explain a difference"

    @property
    def place(self) -> int:
        """0 for the nearest to the cause."""
        return _PLACES[self]

    @property
    def is_cause(self) -> bool:
        """True for what is wrong by itself, False for what may follow from it."""
        return self.place < Stage.MODULE.place


_PLACES = {stage: place for place, stage in enumerate(Stage)}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which something can be wrong. `name`: its check and what is wrong, "scales/amax".

    `says`: the template of the sentence. `numeric`: a number is off. `judged`: False where the check lacks something.
    `key`: the values that tell one failure of the rule from another. `located`: the module of a finding is where the
    fault is, not the worst of many.
    """

    name: str
    says: str
    stage: Stage
    numeric: bool = False
    judged: bool = True
    key: tuple[str, ...] = ()
    located: bool = False
    fix: str | None = None
    formula: str = ""

    @property
    def check(self) -> str:
        return check_of(self.name)

    def finding(  # noqa: PLR0913  what a finding has, beside the values of its sentence
        self,
        *,
        step: int | None = None,
        rank: int | None = None,
        ranks: Iterable[int] = (),
        module: str | None = None,
        operand: str = "",
        expected: str | None = None,
        found: str | None = None,
        size: float | None = None,
        fix: str | None = None,
        notes: Iterable[str] = (),
        details: str = "",
        suffix: str = "",
        values: Mapping[str, Value] = {},
        **more: Value,
    ) -> Finding:
        """A finding by this rule. `rank`: the first of `ranks` where it is not given. `suffix`: ends the sentence.

        `values` and `more` fill the sentence.
        """
        shown = tuple(sorted(set(ranks)))
        return Finding(
            rule=self.name,
            says=self.says + suffix,
            values={**values, **more},
            judged=self.judged,
            verdict=Verdict.NUMERIC if self.numeric else Verdict.INVARIANT,
            step=step,
            rank=shown[0] if rank is None and shown else rank,
            ranks=shown,
            module=module,
            operand=operand,
            expected=expected,
            found=found,
            size=size,
            fix=fix or self.fix,
            notes=tuple(notes),
            details=details,
            formula=self.formula,
        )


class Rules:
    """Declares the rules of one check, each by a call. `stage` and `located` are those of most of them."""

    def __init__(self, check: str, stage: Stage, *, located: bool = False) -> None:
        self.check = check
        self.declared: tuple[Rule, ...] = ()
        self._stage, self._located = stage, located

    def __call__(
        self, name: str, says: str, *, stage: Stage | None = None, located: bool | None = None, **fields: Any
    ) -> Rule:
        """The rule that is declared: its name in the check and its sentence. `fields`: the other ones of `Rule`."""
        rule = Rule(
            name=f"{self.check}/{name}",
            says=says,
            stage=stage or self._stage,
            located=self._located if located is None else located,
            **fields,
        )
        self.declared += (rule,)
        return rule

    def no_witness(self) -> Rule:
        """The rule of a check that lacks a run to compare with."""
        return self("no-witness", "{who} could not be run{why}", stage=Stage.RUN, judged=False, located=False)


def by_name(rules: Iterable[Rule]) -> Mapping[str, Rule]:
    named: dict[str, Rule] = {}
    for rule in rules:
        assert rule.name not in named, f"two rules are named {rule.name}"
        named[rule.name] = rule
    return named
