"""Limits of versions: what is inside of them, and which package is outside."""

from __future__ import annotations

import pytest

from harness.expect.upstream import Verified, is_within
from tests.builders import SOFTWARE

BOTH = Verified(torch=">=2.13,<2.14", torchao=">=0.18,<0.19")


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("2.13", True),
        ("2.13.0", True),
        ("2.13.0+cpu", True),
        ("2.13.1.post2+cu130", True),
        ("2.13.0a0+git12", True),
        ("2.12.9", False),
        ("2.14.0", False),
        ("2.14.0.dev20270101+cpu", False),
        ("2.99", False),
        ("0", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_what_is_within_the_limits(version: str, inside: bool) -> None:
    assert is_within(version, ">=2.13,<2.14") is inside
    assert (BOTH.gap({"torch": version}) is None) is inside


def test_a_gap_names_every_package_that_is_outside() -> None:
    assert BOTH.gap({"torch": "2.99.0", "torchao": "0.18.1"}) == (
        "torch 2.99.0 is installed, verified with torch>=2.13,<2.14"
    )
    assert BOTH.gap({"torch": "2.99.0", "torchao": "0.17.0"}) == (
        "torch 2.99.0 is installed, verified with torch>=2.13,<2.14; "
        "torchao 0.17.0 is installed, verified with torchao>=0.18,<0.19"
    )


@pytest.mark.parametrize("software", [SOFTWARE, {}, {"python": "3.12", "numpy": "1.0"}])
def test_what_is_inside_or_unknown_has_no_gap(software: dict[str, str]) -> None:
    assert BOTH.gap(software) is None


def test_a_package_without_limits_may_have_any_version() -> None:
    assert Verified().gap({"torch": "0", "torchao": "99"}) is None
    assert Verified(torch=">=2").gap({"torch": "2.5", "torchao": "99"}) is None
