"""Bisecting versions: the change is found, what tells nothing is skipped and named, and answers are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.plugins.bugs.bisect import Bisected, VersionAnswer, answers_in, bisect, versions_between
from harness.plugins.bugs.sections import bisected_sections
from harness.report.sections import text_of
from harness.running.versions import Source

PACKAGE = "fp8_harness_toy"


class Versions:
    """Versions 0 to n - 1: from `change` on the other answer; those in `mute` tell nothing."""

    def __init__(self, count: int, change: int, mute: frozenset[int] = frozenset(), *, fixed: bool = False) -> None:
        self.names = [f"0.{at}" for at in range(count)]
        self.asked: list[str] = []
        self._change, self._mute, self._fixed = change, mute, fixed

    @property
    def bad(self) -> str:
        return self.names[0 if self._fixed else -1]

    def ask(self, version: str) -> VersionAnswer:
        self.asked.append(version)
        at = self.names.index(version)
        if at in self._mute:
            return VersionAnswer(version=version, answer="skipped", why="not installed")
        answer = "bad" if (at >= self._change) != self._fixed else "good"
        says = "4 gradients differ by 2 %" if answer == "bad" else ""
        return VersionAnswer(version=version, answer=answer, why=f"answer {at}", says=says)  # type: ignore[arg-type]

    def bisect_in(self, folder: Path) -> Bisected:
        return bisect(self.names, self.bad, self.ask, answers_in(folder / "answers.jsonl"), package="toy")


@given(st.data())
def test_the_change_is_found_between_the_versions_that_tell(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    count = data.draw(st.integers(2, 12))
    change = data.draw(st.integers(1, count - 1))
    mute = data.draw(st.frozensets(st.integers(1, max(1, count - 2)), max_size=3)) - {0, count - 1}
    versions = Versions(count, change, mute, fixed=data.draw(st.booleans()))
    bisected = versions.bisect_in(tmp_path_factory.mktemp("bisect"))
    before, after = (versions.names.index(answer.version) for answer in (bisected.before, bisected.after))
    assert before < change <= after
    assert (
        {versions.names.index(answer.version) for answer in bisected.unknown} == set(range(before + 1, after)) <= mute
    )
    assert len(versions.asked) == len(set(versions.asked))


def test_what_is_known_is_not_asked_again(tmp_path: Path) -> None:
    first, again = Versions(9, 4, frozenset({3})), Versions(9, 4, frozenset({3}))
    bisected = first.bisect_in(tmp_path)
    assert again.bisect_in(tmp_path).after.version == bisected.after.version == "0.4"
    assert again.asked == ["0.3"]  # what was skipped may have been the fault of the machine
    text = text_of(bisected_sections(again.bisect_in(tmp_path)))
    assert "the first version that fails: toy 0.3 or 0.4" in text
    assert "skipped  0.3: not installed" in text and "0.8 bad (kept)" in text


def test_the_first_version_without_the_failure_is_found_too(tmp_path: Path) -> None:
    text = text_of(bisected_sections(Versions(6, 2, fixed=True).bisect_in(tmp_path)))
    says = "         4 gradients differ by 2 %"
    assert text.startswith(f"the first version without the failure: toy 0.2\n  bad    0.1: answer 1\n{says}\n  good")


def test_ends_must_be_as_said(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"toy 0\.2 is good, not bad: answer 2"):
        Versions(3, 3).bisect_in(tmp_path)
    with pytest.raises(HarnessError, match="1 versions from the good to the bad one"):
        Versions(1, 1).bisect_in(tmp_path)


def test_versions_of_a_folder_are_in_order(tmp_path: Path) -> None:
    for version in ("0.9", "0.10", "0.10rc1", "0.11", "0.11+cpu", "0.2"):
        (tmp_path / f"{PACKAGE}-{version}-py3-none-any.whl").touch()
    (tmp_path / "other-1.0-py3-none-any.whl").touch()
    (tmp_path / "broken.whl").touch()
    source = Source(find_links=tmp_path)
    assert versions_between(PACKAGE, "0.9", "0.11", source) == (("0.9", "0.10", "0.11"), "0.11")
    assert versions_between(PACKAGE, "0.11", "0.10rc1", source) == (("0.10rc1", "0.10", "0.11"), "0.10rc1")
    assert versions_between(PACKAGE, "0.10", "0.11+cpu", source) == (("0.10", "0.11+cpu"), "0.11+cpu")
    assert versions_between(PACKAGE, "0.11", "0.11+cpu", source) == (("0.11", "0.11+cpu"), "0.11+cpu")
    assert versions_between(PACKAGE, "0.11", "0.12.dev3", source, given=("0.12.dev3",)).versions == (
        "0.11",
        "0.12.dev3",
    )
    with pytest.raises(HarnessError, match=r"0\.12 is not released there\. Fix: the newest are 0\.11\+cpu, 0"):
        versions_between(PACKAGE, "0.9", "0.12", source)
    with pytest.raises(HarnessError, match="'new' is no version"):
        versions_between(PACKAGE, "0.9", "new", source)


NIGHTS = ("0.15.0.dev20260801", "0.15.0.dev20260803", "0.15.0", "0.16.0.dev20260804", "0.16.0.dev20260806")


@pytest.fixture
def nightlies(tmp_path: Path) -> Source:
    for version in NIGHTS:
        (tmp_path / f"{PACKAGE}-{version}+cpu-py3-none-any.whl").touch()
    return Source(find_links=tmp_path)


@pytest.mark.parametrize(
    ("good", "bad", "at"),
    [
        ("2026-08-01", "2026-08-06", (0, 1, 3, 4)),  # the release was made of another branch
        ("2026-08-02", "2026-08-05", (0, 1, 3)),  # of days without a nightly, the one before
        ("2026-08-28", "2026-08-03", (1, 3, 4)),
        ("0.15.0.dev20260803", "0.16.0.dev20260804+cpu", (1, 3)),
        ("0.15.0", "2026-08-06", (2, 3, 4)),
        ("2026-08-03", "0.15.0", (1, 2)),
    ],
)
def test_a_date_stands_for_a_nightly(nightlies: Source, good: str, bad: str, at: tuple[int, ...]) -> None:
    searched = versions_between(PACKAGE, good, bad, nightlies)
    assert searched.versions == tuple(f"{NIGHTS[place]}+cpu" for place in at)
    assert searched.bad == searched.versions[0 if good == "2026-08-28" else -1]


def test_a_date_before_the_first_nightly_says_which_is_the_first(nightlies: Source, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"no nightly of .* until 2026-07-31\. Fix: the first is of 2026-08-01\."):
        versions_between(PACKAGE, "2026-07-31", "2026-08-06", nightlies)
    empty = Source(find_links=tmp_path / "none")
    with pytest.raises(HarnessError, match="give versions, or an index of nightlies"):
        versions_between(PACKAGE, "2026-08-01", "2026-08-06", empty)
