"""Sixty clean hand-offs: each format from each layout, made of real DTensors on ranks, without a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8_harness import assert_handoff
from tests.plugins.handoff.trainers import FORMATS, LAYOUTS, handed_off, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clean_hand_off_of_a_layout_has_no_finding_in_any_format(
    layout: str, fp8_ranks: Callable[..., list[dict[str, Any]]]
) -> None:
    ranks = fp8_ranks(handed_off, LAYOUTS[layout][0], layout)
    source = [made["source"] for made in ranks]
    for name in FORMATS:
        assert_handoff(source, [made[name] for made in ranks], format=name)
    assert_handoff(weights(), [made["mxfp8"] for made in ranks], format="mxfp8")


def test_there_are_sixty() -> None:
    assert len(LAYOUTS) * len(FORMATS) == 60
