"""Formulas are claims about versions: what one disagrees with may be a change of torch or torchao, or a fault.

A formula is evaluated with every version. With versions that it was verified with, a disagreement is a fault. With
others it is a finding of its own kind, and a case with no other findings is `changed`: not good, and nothing proves
that it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.checks.judge import Judgement
from harness.verdict import Finding, Verdict


def with_doubts(found: Judgement, doubts: Mapping[str, str]) -> Judgement:
    """The judgement with a note at every finding by a formula in `doubts`: the formulas not verified here, and why."""
    findings = tuple(_noted(each, doubts) for each in found.findings)
    only_doubted = found.verdict is Verdict.INVARIANT and all(each.differs for each in findings)
    verdict = Verdict.CHANGED if only_doubted else found.verdict
    return msgspec.structs.replace(found, verdict=verdict, findings=findings)


def _noted(finding: Finding, doubts: Mapping[str, str]) -> Finding:
    differs = doubts.get(finding.formula)
    return finding if differs is None else msgspec.structs.replace(finding, differs=differs)
