"""Sixty clean hand-offs: each format from each layout, made of real DTensors on ranks, without a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8_harness import assert_handoff
from harness.plugins.handoff.library import judge
from tests.plugins.handoff.trainers import FORMATS, LAYOUTS, handed_off, weights

pytestmark = pytest.mark.sweep  # other tests hand off one clean state of each kind in every run

Made = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(fp8_ranks: Callable[..., list[Made]]) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank of each layout made; ranks are started once for a number of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for count in sorted({count for count, _ in LAYOUTS.values()}):
        own = [layout for layout, (size, _) in LAYOUTS.items() if size == count]
        made = fp8_ranks(handed_off, count, own)
        found |= {layout: [of_rank[layout] for of_rank in made] for layout in own}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_clean_hand_off_has_no_finding(layout: str, name: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    source, exported = ([made[key] for made in ranks[layout]] for key in ("source", name))
    judged = judge(source, exported, format=name)
    assert (judged.findings, judged.weights, judged.quantized) == ((), 27, 22)


def test_what_ranks_put_together_is_the_export_of_one_rank(ranks: dict[str, list[dict[str, Any]]]) -> None:
    one_rank = ranks["single"][0]["mxfp8"]
    for made in ranks.values():
        assert_handoff(weights(), [each["mxfp8"] for each in made], format="mxfp8", one_rank=one_rank)


def test_there_are_sixty() -> None:
    assert len(LAYOUTS) * len(FORMATS) == 60
