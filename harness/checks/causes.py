"""Orders findings: the one nearest to the cause first.

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


class Pattern(NamedTuple):
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
    patterns: tuple[Pattern, ...]


CAUSES = (
    Stage(
        "ranks and data",
        "of other tokens or weights every number is another, and without all steps nothing is complete",
        (
            Pattern(finite.NAME, verdict=Verdict.INVARIANT),
            Pattern(loss_vs_golden.NAME, " than the golden"),
            Pattern(parity.NAME, "wrong tokens"),
            Pattern(tokens.NAME),
            Pattern(model.NAME, "buffer "),
            Pattern(resume.NAME),
        ),
    ),
    Stage(
        "the model that was built",
        "what is not converted, checkpointed, sharded or compiled as asked casts, sends and keeps something else",
        (
            Pattern(model.NAME),
            Pattern(fp8_on.NAME),
            Pattern(alignment.NAME),
            Pattern(recompute.NAME, "was not recomputed"),
            Pattern(recompute.NAME, "repeat nothing of forward"),
            Pattern(memory.NAME, "marks of checkpointing"),
            Pattern(memory.NAME, "is that of checkpointing"),
            Pattern(traffic.NAME, "gathered in high precision"),
            Pattern(graphs.NAME, "no graph was compiled"),
            Pattern(graphs.NAME, "nothing was fused"),
        ),
    ),
    Stage(
        "casts and scales",
        "a scale decides the float8 values that are made with it; a missing amax reduction shows in the scale too",
        (Pattern(scales.NAME), Pattern(graph_scales.NAME)),
    ),
    Stage(
        "float8 values and operands",
        "values saturate or differ where a scale is wrong; alone they are the fault of the cast or of the matmul",
        tuple(
            Pattern(check, words)
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
        (Pattern(traffic.NAME), Pattern(stated.NAME), Pattern(signature.NAME)),
    ),
    Stage(
        "matmuls, graphs and recomputation",
        "how a result is computed decides its numbers",
        (Pattern(graphs.NAME), Pattern(matmuls.NAME), Pattern(recompute.NAME)),
    ),
)

_MEMORY = (
    Pattern(memory.NAME),
    Pattern(live_memory.NAME),
    Pattern(live_memory.LEAKS),
    Pattern(stated.NAME, " saved for backward"),
    Pattern(signature.NAME, " saved for backward"),
    Pattern(signature.NAME, " alive "),
)

# What is wrong because something else is, or the only sign of a fault that no rule above describes.
EFFECTS = (
    Stage("a module", "it had the right operands", (Pattern(local_parity.NAME),)),
    Stage(
        "the first operand that differs",
        "it names the module behind the fault",
        (Pattern(divergence.NAME), Pattern(scales.NAME, "replicas of a tensor have different float8 data")),
    ),
    Stage(
        "a loss that is no number", "gradients of such a loss are no numbers either", (Pattern(finite.NAME, "loss is"),)
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
            Pattern(clipping.NAME),
            Pattern(evaluation.NAME),
            Pattern(metamorphic.NAME),
            Pattern(parity.NAME),
            Pattern(finite.NAME),
            Pattern(loss_vs_golden.NAME),
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
        (not pattern.words, stage, within)
        for stage, (_, _, kinds) in enumerate(_STAGES)
        for within, pattern in enumerate(kinds)
        if pattern.matches(finding)
    ]
    _, stage, within = min(places, default=(False, 0, 0))  # of the judge and the engine: about the whole run
    return stage, within


def _may_be_cause(finding: Finding, wrong_from: float) -> bool:
    return finding.judged and _place(finding)[0] < len(CAUSES) and (finding.step or 1) <= wrong_from


def _first_wrong_number(findings: Iterable[Finding]) -> float:
    """The first step in which a number is wrong; infinite where none is. What is kept in memory is no number."""
    effects = (each for each in findings if each.judged and _place(each)[0] >= len(CAUSES))
    numbers = (each for each in effects if not any(pattern.matches(each) for pattern in _MEMORY))
    return min((each.step for each in numbers if each.step is not None), default=math.inf)
