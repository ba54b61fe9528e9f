"""Goldens that change, as a reviewer sees them; and which of them can be made here."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.evidence.golden import GoldenChange, GoldenKey
from harness.matrix.caseid import case_id, reference_case
from harness.plugins.baseline.review import golden_section, review_sections
from harness.plugins.baseline.update_command import with_target_here
from harness.project import Project
from harness.report.sections import text_of
from tests.builders import make_case, make_golden

ROOT = Path(__file__).parents[4]
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
    elsewhere = replace(OLD, provenance=replace(OLD.provenance, cpu="Other CPU avx2"))
    far = change_text(replace(moved(0.5), old=elsewhere))
    assert "beyond noise: 5.0e-01 of 1.0e-03 nats allowed at step 1\n  CPU: Other CPU avx2 -> " in far
    assert "changed, other data" in change_text(moved(0.5, data_digest="other"))


def test_a_review_names_the_reason_the_goldens_and_the_versions() -> None:
    gone = GoldenKey(hardware="cpu", family="old")
    text = review_text(moved(0.5), GoldenChange(old=OLD, new=OLD), gone=[gone])
    head, empty, first, second, *rest = text.splitlines()
    assert (head, empty) == ("2 goldens changed: torch 2.14 changed AdamW", "")
    assert first.startswith(OLD.family) and "beyond noise: 5.0e-01" in first
    assert second.split() == ["old", "cpu", "removed"]
    assert rest == ["", "torch 2.13.0+cpu -> 2.14.0", "torchao 0.18.0 -> none"]
    assert review_text(GoldenChange(old=OLD, new=replace(OLD, provenance=moved(0).new.provenance))) == ""


def test_references_of_a_target_that_is_not_installed_are_left_out_unless_they_are_named(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    here, absent = make_case(), make_case(target="no_such_trainer")
    assert with_target_here(project, (here, absent), named=False) == (here,)
    assert "1 golden left out: target no_such_trainer: there is no module" in capsys.readouterr().err
    with pytest.raises(HarnessError, match="there is no module no_such_trainer"):
        with_target_here(project, (here, absent), named=True)
    with pytest.raises(HarnessError, match="no golden is missing that can be made here"):
        with_target_here(project, (absent,), named=False)
