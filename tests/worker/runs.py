"""What tests ask of runs on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.checks.check import Rule
from harness.trace import RankTrace
from harness.verdict import Finding

_FIXES = Path(__file__).parents[2] / "cases" / "fixes"
WHOLE_WEIGHT = f"{_FIXES / 'scale_of_whole_weight.py'}:apply"
UNDER_TP = f"{_FIXES / 'mxfp8_under_tp.py'}:apply"


def sweep(*values: object) -> Any:
    """A parameter set for the sweeps: another one shows the same in every run, at less cost."""
    return pytest.param(*values, marks=pytest.mark.sweep)


def numbers(traces: Sequence[RankTrace]) -> list[list[tuple[float | None, ...]]]:
    """Losses and gradient norm of every step, by rank."""
    return [[(step.evaluation_loss, step.loss, step.grad_norm) for step in trace.steps] for trace in traces]


def assert_named(findings: Sequence[Finding], rule: Rule, **values: str) -> None:
    """A finding by the rule has these values.

    Each is about the first step and rank, and says what was expected and found.
    """
    assert any(finding.rule == rule.name and values.items() <= dict(finding.values).items() for finding in findings), (
        findings
    )
    assert all(finding.step == 1 and finding.rank == 0 and finding.expected and finding.found for finding in findings)
