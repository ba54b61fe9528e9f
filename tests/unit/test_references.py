"""A golden that changed: does the noise that was measured explain it?"""

from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.engine.hardware import cpu_extensions
from harness.evidence.golden import GoldenChange, largest_change
from harness.matrix.caseid import case_id, reference_case
from tests.builders import make_case, make_golden

ROOT = Path(__file__).parents[2]
CASE = make_case()
OLD = make_golden(CASE, case_id=case_id(reference_case(CASE)))


def changed(*by: float) -> GoldenChange:
    losses = tuple(loss + more for loss, more in zip(OLD.losses, by, strict=True))
    return GoldenChange(old=OLD, new=replace(OLD, losses=losses))


def test_the_step_that_changed_most_for_what_is_allowed_is_told() -> None:
    largest = largest_change(changed(1e-4, 0, 0, -3.6e-4, 3.5e-4), ROOT)
    assert largest is not None and largest.explains
    assert (largest.step, largest.change) == (4, pytest.approx(3.6e-4))
    assert largest.allowed == 0.00118
    assert largest_change(changed(0, 0, 0, 0, 0.0012), ROOT).explains is False  # type: ignore[union-attr]


def test_nothing_is_said_where_nothing_can_be_compared() -> None:
    some = changed(0, 0, 0, 0, 1e-4)
    assert largest_change(replace(some, old=None), ROOT) is None
    assert largest_change(replace(some, new=replace(some.new, data_digest="other")), ROOT) is None
    large = case_id(reference_case(make_case(dim=512)))
    assert largest_change(replace(some, new=replace(some.new, case_id=large)), ROOT) is None


def test_the_extensions_of_a_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: Xeon\nflags\t\t: fpu smep avx2 amx_tile bf16\n\nmodel name\t: Other\n")
    assert cpu_extensions(info) == "Xeon avx2, amx_tile, bf16"
    info.write_text("Features\t: fp asimd sve2 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    assert cpu_extensions(info) == "ARM 0x41 0xd4f asimd, sve2, i8mm"
    assert cpu_extensions(tmp_path / "none") == ""
