"""docs/checks.md: made of the declarations of the checks and of the recorded mutation matrix, and never stale."""

from __future__ import annotations

from pathlib import Path

from harness.checks.catalogue import CHECKS, RULES
from harness.evidence.kills import read_kills
from harness.matrix.faults import all_faults
from harness.report.checks import checks_markdown

ROOT = Path(__file__).parents[2]
# Found by no planted fault: what lacks a reference cannot be judged, and a model that states nothing has no `stated`.
UNPROVEN = {"stated", "signature"}  # `tests/power/test_example.py` plants faults in a model that has both


def test_the_page_is_what_explain_prints() -> None:
    page = (ROOT / "docs" / "checks.md").read_text()
    assert page == checks_markdown(read_kills(ROOT)), "run `fp8-harness explain --checks > docs/checks.md`"


def test_every_check_is_described_and_its_rules_are_listed() -> None:
    text = checks_markdown(None)
    for check in CHECKS:
        assert check.question.endswith("?") and check.blind.endswith(".")
        assert f"\n## {check.name}\n" in text
    assert all(f"`{rule.name}`" in text for check in CHECKS for rule in check.rules)


def test_the_recorded_mutation_matrix_is_that_of_the_catalogue() -> None:
    kills = read_kills(ROOT)
    assert kills is not None and kills.found.keys() == all_faults().keys()
    for name, cases in kills.found.items():
        assert all(kill.rules for kill in cases.values()) or all_faults()[name].equivalent, name
    found = {rule for cases in kills.found.values() for kill in cases.values() for rule in kill.rules}
    assert found <= RULES.keys() | {"judge/unexplained", "judge/other-end", "judge/missing"}


def test_every_check_is_proven_by_a_planted_fault() -> None:
    kills = read_kills(ROOT)
    assert kills is not None
    assert {check.name for check in CHECKS if not kills.by_check(check.name)} == UNPROVEN
