"""The order of findings: the one nearest to the cause first.

One fault breaks many things. What a finding is about tells how near it is to the cause (`CAUSES`, `EFFECTS`): a wrong
scale makes gradients wrong, and no gradient makes a scale wrong in the same step. But nothing causes what was seen in
an earlier step: gradients that are wrong in step 1 make scales wrong in step 2. So findings of `CAUSES` come first if
they are not later than the first wrong number, by stage and then by step; everything else by step and then by stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from harness.checks import (
    alignment,
    clipping,
    divergence,
    evaluation,
    finite,
    fp8_on,
    graph_scales,
    graphs,
    live_memory,
    local_parity,
    loss_vs_golden,
    matmuls,
    memory,
    metamorphic,
    model,
    parity,
    recompute,
    resume,
    scales,
    signature,
    stated,
    tokens,
    traffic,
)
from harness.verdict import Finding, Verdict


class Told(NamedTuple):
    """Findings of one check, or those of them whose message has these words, or this verdict."""

    check: str
    words: str = ""
    verdict: Verdict | None = None

    def matches(self, finding: Finding) -> bool:
        """True when the finding is one of them."""
        same = self.check == finding.check and self.verdict in (None, finding.verdict)
        return same and self.words in finding.message


class Stage(NamedTuple):
    """Findings that are equally near to the cause. `why` says why they are nearer to it than those of the next."""

    what: str
    why: str
    told: tuple[Told, ...]


CAUSES = (
    Stage(
        "ranks and data",
        "of other tokens or weights every number is another, and without all steps nothing is complete",
        (
            Told(finite.NAME, verdict=Verdict.INVARIANT),
            Told(loss_vs_golden.NAME, " than the golden"),
            Told(parity.NAME, "wrong tokens"),
            Told(tokens.NAME),
            Told(model.NAME, "buffer "),
            Told(resume.NAME),
        ),
    ),
    Stage(
        "the model that was built",
        "what is not converted, checkpointed, sharded or compiled as asked casts, sends and keeps something else",
        (
            Told(model.NAME),
            Told(fp8_on.NAME),
            Told(alignment.NAME),
            Told(recompute.NAME, "was not recomputed"),
            Told(recompute.NAME, "repeat nothing of forward"),
            Told(memory.NAME, "marks of checkpointing"),
            Told(memory.NAME, "is that of checkpointing"),
            Told(traffic.NAME, "gathered in high precision"),
            Told(graphs.NAME, "no graph was compiled"),
            Told(graphs.NAME, "nothing was fused"),
        ),
    ),
    Stage(
        "casts and scales",
        "a scale decides the float8 values that are made with it; a missing amax reduction shows in the scale too",
        (Told(scales.NAME), Told(graph_scales.NAME)),
    ),
    Stage(
        "float8 values and operands",
        "values saturate or differ where a scale is wrong; alone they are the fault of the cast or of the matmul",
        tuple(
            Told(check, words)
            for check in (scales.NAME, graph_scales.NAME)
            for words in (
                "float8 data does not match",
                "float8 values saturate",
                "float8 values are NaN",
                "matmul uses the wrong scale",
                "matmul operand",
            )
        ),
    ),
    Stage(
        "collectives",
        "what ranks send decides what they compute next",
        (Told(traffic.NAME), Told(stated.NAME), Told(signature.NAME)),
    ),
    Stage(
        "matmuls, graphs and recomputation",
        "how a result is computed decides its numbers",
        (Told(graphs.NAME), Told(matmuls.NAME), Told(recompute.NAME)),
    ),
)

_MEMORY = (
    Told(memory.NAME),
    Told(live_memory.NAME),
    Told(live_memory.LEAKS),
    Told(stated.NAME, " saved for backward"),
    Told(signature.NAME, " saved for backward"),
    Told(signature.NAME, " alive "),
)

# What is wrong because something else is, or the only sign of a fault that no rule above describes.
EFFECTS = (
    Stage("a module", "it had the right operands", (Told(local_parity.NAME),)),
    Stage(
        "the first operand that differs",
        "it names the module behind the fault",
        (Told(divergence.NAME), Told(scales.NAME, "replicas of a tensor have different float8 data")),
    ),
    Stage(
        "a loss that is no number", "gradients of such a loss are no numbers either", (Told(finite.NAME, "loss is"),)
    ),
    Stage(
        "memory",
        "what is kept for too long may be used again",
        _MEMORY,
    ),
    Stage(
        "results of the whole model",
        "compared with the same layout, then with one rank in FP8, then with BF16: ever more explains a difference",
        (
            Told(clipping.NAME),
            Told(evaluation.NAME),
            Told(metamorphic.NAME),
            Told(parity.NAME),
            Told(finite.NAME),
            Told(loss_vs_golden.NAME),
        ),
    ),
)

_STAGES = (*CAUSES, *EFFECTS)


def by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings in the order of causes. Those that could not be judged say nothing about a cause and come last."""
    found = tuple(findings)
    wrong_from = _first_wrong_number(found)

    def key(finding: Finding) -> tuple[int, ...]:
        stage, within = _place(finding)
        step, rank = finding.step or 1, (within, finding.verdict is not Verdict.INVARIANT)
        if not finding.judged:
            return (2,)
        return (0, stage, step, *rank) if _may_be_cause(finding, wrong_from) else (1, step, stage, *rank)

    return tuple(sorted(found, key=key))


def first_effect(findings: Sequence[Finding]) -> int | None:
    """The index of the first finding that may follow from those before it; None where there is no such division."""
    wrong_from = _first_wrong_number(findings)
    causes = [_may_be_cause(finding, wrong_from) for finding in findings]
    return causes.index(False) if causes[:1] == [True] and not all(causes) else None


def _place(finding: Finding) -> tuple[int, int]:
    """The index of the stage of a finding, and of the kind in it. Kinds with words are matched before whole checks."""
    places = [
        (not told.words, stage, within)
        for stage, (_, _, kinds) in enumerate(_STAGES)
        for within, told in enumerate(kinds)
        if told.matches(finding)
    ]
    _, stage, within = min(places, default=(False, 0, 0))  # of the judge and the engine: about the whole run
    return stage, within


def _may_be_cause(finding: Finding, wrong_from: float) -> bool:
    return finding.judged and _place(finding)[0] < len(CAUSES) and (finding.step or 1) <= wrong_from


def _first_wrong_number(findings: Iterable[Finding]) -> float:
    """The first step in which a number is wrong; infinite where none is. What is kept in memory is no number."""
    effects = (each for each in findings if each.judged and _place(each)[0] >= len(CAUSES))
    numbers = (each for each in effects if not any(told.matches(each) for told in _MEMORY))
    return min((each.step for each in numbers if each.step is not None), default=math.inf)
