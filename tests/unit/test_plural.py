"""Numbers in messages."""

from __future__ import annotations

import pytest

from harness.plural import counted


@pytest.mark.parametrize(("count", "text"), [(0, "0 cases"), (1, "1 case"), (2, "2 cases")])
def test_a_noun_has_the_number_of_its_count(count: int, text: str) -> None:
    assert counted(count, "case") == text


def test_nouns_without_s_have_a_plural_of_their_own() -> None:
    assert (counted(1, "witness", "witnesses"), counted(2, "witness", "witnesses")) == ("1 witness", "2 witnesses")
