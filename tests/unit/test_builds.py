"""Nightlies, builds of a commit and releases: their order, what evidence of each holds for, and what limits say."""

from __future__ import annotations

import pytest

from harness.sources import evidence_key, holds_for, is_among, is_since, is_unreleased

RISING = (
    "2.14.1",
    "2.15.0.dev20260801",
    "2.15.0.dev20260802+cpu",
    "2.15.0a0+git12",
    "2.15.0rc1",
    "2.15.0",
    "2.15.0+cu130",
    "2.15.0.post1",
    "2.16.0.dev20261120+cpu",
)


@pytest.mark.parametrize("version", RISING)
def test_a_pre_release_is_older_than_its_release(version: str) -> None:
    at = RISING.index(version)
    assert [is_since(version, other) for other in RISING] == [True] * (at + 1) + [False] * (len(RISING) - at - 1)
    assert is_since(version, "2.15") is (at >= RISING.index("2.15.0"))


@pytest.mark.parametrize("version", ["", "unknown", "nightly"])
def test_what_is_no_version_has_nothing(version: str) -> None:
    assert not is_since(version, "0") and not is_unreleased(version) and evidence_key(version) == version
    assert is_among(version, ">=2.13") is False and is_among(version, "") is True


@pytest.mark.parametrize(
    ("version", "key", "unreleased"),
    [
        ("2.13.0", "2.13.0", False),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.13.0+cu130", "2.13.0", False),
        ("2.13.0.post1+cpu", "2.13.0.post1", False),
        ("2.13.0+git12", "2.13.0+git12", True),
        ("2.13.0a0+git12", "2.13.0a0+git12", True),
        ("2.16.0rc2", "2.16.0rc2", True),
        ("2.16.0.dev20261120+cpu", "2.16.0.dev20261120+cpu", True),
    ],
)
def test_evidence_is_of_a_release_or_of_exactly_one_build(version: str, key: str, unreleased: bool) -> None:
    assert (evidence_key(version), is_unreleased(version)) == (key, unreleased)
    made_with = {"torch": version, "torchao": "0.18.0", "numpy": "2.0.dev1"}
    assert holds_for({"torch": version}, made_with)
    assert holds_for({"torch": "2.99.0"}, made_with) is not unreleased


FIXED_IN_2_14, NEW_IN_2_15 = ">=2.13,<2.14", ">=2.15"


@pytest.mark.parametrize(
    ("version", "limits", "among"),
    [
        ("2.13.0", FIXED_IN_2_14, True),
        ("2.13.1.post2+cu130", FIXED_IN_2_14, True),
        ("2.13.0+git12", FIXED_IN_2_14, True),
        ("2.12.9", FIXED_IN_2_14, False),
        ("2.14.0", FIXED_IN_2_14, False),
        ("2.13.0.dev20260301", FIXED_IN_2_14, None),  # 2.12 has no such fault, 2.13.0 does
        ("2.13.0a0+git12", FIXED_IN_2_14, None),
        ("2.13.1rc1", FIXED_IN_2_14, True),  # 2.13.0 and 2.13.1 have it
        ("2.14.0.dev20260601+cpu", FIXED_IN_2_14, None),  # the last 2.13 has it, 2.14.0 does not
        ("2.14.1rc1", FIXED_IN_2_14, False),
        ("2.15.0.dev20260801", FIXED_IN_2_14, False),
        ("2.15.0.dev20260801", NEW_IN_2_15, None),
        ("2.15.0", NEW_IN_2_15, True),
        ("2.16.0.dev20261120", NEW_IN_2_15, True),
        ("2.14.1", NEW_IN_2_15, False),
        ("2.14.0.dev20260601", "==2.13.*", None),
        ("0.3.0.dev1", "==0.2.2", False),
        ("0.2.2.dev1", "==0.2.2", None),
        ("1.0.0.dev1", "<1", None),
        ("2.16.0.dev20261120", ">=2.16.0.dev20261110", True),  # limits that tell the night
        ("2.16.0.dev20261109", ">=2.16.0.dev20261110", False),
        ("2.13.0+cu130", "==2.13.0", True),
        ("2.13.0+cu130", "==2.13.0+cpu", False),
        ("2.13.0+cpu", "!=2.13.0+cpu", False),
    ],
)
def test_what_limits_say_of_a_build(version: str, limits: str, among: bool | None) -> None:
    assert is_among(version, limits) is among
