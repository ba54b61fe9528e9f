"""What follows from a case stays: ids, names of goldens and witnesses, relations, tolerance keys, costs."""

import pytest

from harness.matrix.caseid import parse_case_id
from tests.frozen import STORED, frozen_line


@pytest.mark.plugin("bugs", "faults")
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.sweep)])
def test_what_follows_from_a_case_is_what_was_stored(every: int) -> None:
    lines = STORED.read_text().splitlines()
    assert len(lines) > 700
    changed = [line for line in lines[::every] if frozen_line(parse_case_id(line.split()[0])) != line]
    assert changed == []
