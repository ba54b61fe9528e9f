"""What is said of goldens that change, also to whoever reviews the commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from harness.evidence.golden import GoldenChange, GoldenKey
from harness.matrix.caseid import case_id, reference_case
from harness.report.evidence import golden_section, review_sections
from harness.report.sections import text_of
from tests.builders import make_case, make_golden

ROOT = Path(__file__).parents[2]
CASE = make_case()
OLD = make_golden(CASE, case_id=case_id(reference_case(CASE)), reason="first")


def moved(by: float, **changes: str) -> GoldenChange:
    provenance = replace(OLD.provenance, reason="torch 2.14 changed AdamW", software={"torch": "2.14.0"})
    losses = (OLD.losses[0] + by, *OLD.losses[1:])
    return GoldenChange(old=OLD, new=replace(OLD, losses=losses, provenance=provenance, **changes))


def change_text(change: GoldenChange) -> str:
    return text_of([golden_section(change, ROOT)])


def review_text(*changes: GoldenChange, gone: Sequence[GoldenKey] = ()) -> str:
    return text_of(review_sections(changes, ROOT, gone=gone))


def test_a_change_has_its_steps_and_whether_noise_explains_it() -> None:
    text = change_text(moved(3.6e-4))
    assert text.startswith(f"{OLD.family} on cpu: changed, within noise: 3.6e-04 of 1.0e-03 nats allowed at step 1\n")
    assert len(text.splitlines()) == 2 + len(OLD.losses)
    assert "beyond noise" in change_text(moved(0.5))
    assert "changed, other data" in change_text(moved(0.5, data_digest="other"))


def test_a_review_names_the_reason_the_goldens_and_the_versions() -> None:
    gone = GoldenKey(hardware="cpu", family="old")
    text = review_text(moved(0.5), GoldenChange(old=OLD, new=OLD), gone=[gone])
    head, empty, first, second, *rest = text.splitlines()
    assert (head, empty) == ("2 goldens changed: torch 2.14 changed AdamW", "")
    assert first.startswith(OLD.family) and "beyond noise: 5.0e-01" in first
    assert second.split() == ["old", "cpu", "removed"]
    assert rest == ["", "torch 2.13.0+cpu -> 2.14.0", "torchao 0.18.0 -> none"]


def test_nothing_is_to_review_where_nothing_changed() -> None:
    assert review_text(GoldenChange(old=OLD, new=replace(OLD, provenance=moved(0).new.provenance))) == ""
