"""The library in the pytest of a stranger: a fresh folder with the tests of its page and some that must fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.acceptance.conftest import REPOSITORY

# Behind the tests of the page, in the same file: what is broken, and how it is told.
BROKEN = '''
import pytest
from unittest import SkipTest


class OwnLoss(Trainer):
    """Every rank reports the loss of its own tokens."""

    def reported(self, loss):
        return loss


class Unreduced(Trainer):
    """One rank of two takes a step of its own."""

    def step(self, microbatches):
        returned = super().step(microbatches)
        if dist.get_rank() == 1:
            with torch.no_grad():
                self.model[1].weight.to_local().mul_(1.01)
        return returned


class InHighPrecision(Trainer):
    def __init__(self, case, world):
        super().__init__(case, world)
        self.model[1].__class__ = nn.Linear


class NoTp(Trainer):
    def __init__(self, case, world):
        if case.layout.tp > 1:
            raise NotImplementedError("no tensor parallelism here")
        super().__init__(case, world)


class OwnLossAndNoTp(OwnLoss, NoTp): ...


@pytest.mark.parametrize("build", [OwnLoss, Unreduced, NoTp, OwnLossAndNoTp], ids=lambda build: build.__name__)
def test_broken(build):
    assert_layouts_equal(build, ["fsdp2", "tp2"])


def test_one_layout_in_high_precision():
    assert_layouts_equal(InHighPrecision, ["fsdp2"])


def ends(value):
    if value == "raise" and dist.get_rank() == 1:
        raise ValueError("rank one has no data")
    if value == "skip":
        raise SkipTest("no such kernel")
    return object() if value == "object" else {"rank": dist.get_rank(), "float8": torch.ones(2).to(torch.float8_e4m3fn)}


@pytest.mark.parametrize("value", ["raise", "skip", "object", "fine"])
def test_ends(fp8_ranks, value):
    returned = fp8_ranks(ends, 2, value)
    assert [of["rank"] for of in returned] == [0, 1] and returned[0]["float8"].dtype == torch.float8_e4m3fn


def test_too_many_ranks(fp8_ranks):
    fp8_ranks(ends, 4096, "fine")


def test_unknown_case():
    assert_case("fsdp2-tensorwide-v2048")
'''


class Session(NamedTuple):
    """What a run of pytest said, by the names of its tests: "passed", or what failed or why it was skipped."""

    folder: Path
    home: Path
    said: Mapping[str, str]
    output: str


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Run all of them under pytest-xdist, each worker with a fork server of its own, and with an empty home folder."""
    folder = tmp_path_factory.mktemp("stranger")
    page = (REPOSITORY / "docs" / "library.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (folder / "test_fp8.py").write_text("\n".join((*blocks, BROKEN)))
    home = tmp_path_factory.mktemp("home")
    ours = ("FP8_HARNESS", "PYTEST", "XDG_CACHE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), environment.get("PYTHONPATH"))))
    given = {**environment, "PYTHONPATH": paths, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    report = tmp_path_factory.mktemp("report") / "junit.xml"
    words = ("-q", "-n2", "-p", "no:cacheprovider", "-W", "error::UserWarning:fp8_harness", f"--junitxml={report}")
    command = [sys.executable, "-m", "pytest", *words, "test_fp8.py"]
    done = subprocess.run(command, cwd=folder, env=given, check=False, capture_output=True, text=True, timeout=600)
    said = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ended = next((end for end in case if end.tag in ("failure", "skipped", "error")), None)
        said[case.attrib["name"]] = "passed" if ended is None else f"{ended.tag}: {ended.attrib['message']}"
    return Session(folder, home, said, done.stdout + done.stderr)


def test_what_the_page_shows_passes_and_nothing_is_written_but_the_cache(session: Session) -> None:
    for name in ("test_layouts", "test_case", "test_sum"):
        assert session.said[name] == "passed", session.output
    assert [path.name for path in session.folder.iterdir()] == ["test_fp8.py"]
    assert [path.name for path in session.home.iterdir()] == [".cache"]
    assert [path.name for path in (session.home / ".cache").iterdir()] == ["fp8-harness"]


def test_the_page_shows_the_failure_that_is_printed(session: Session) -> None:
    page = (REPOSITORY / "docs" / "library.md").read_text()
    shown = page.partition("```\nAssertionError: ")[2].partition("\n```")[0]
    printed = session.said["test_broken[OwnLoss]"].partition(": AssertionError: ")[2]
    words = [re.sub(r"\d\.\d+", "N", " ".join(text.split())) for text in (shown, printed)]
    assert words[0] and words[0] == words[1]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "test_broken[OwnLoss]",
            (
                r"fsdp2: parity/loss: loss differs from the single-rank",
                "expected .*, found ",
                "fix: return the loss of",
            ),
        ),
        ("test_broken[Unreduced]", (r"fsdp2: \S+/\S+.*1", "expected ", "(next|fix): ")),
        (
            "test_one_layout_in_high_precision",
            ("fsdp2: fp8_on/not-converted in 1: 1 of 2 linears", "expected converted", 'fix: .*filter_fqns=."1",'),
        ),
        ("test_broken[OwnLossAndNoTp]", ("fsdp2: parity/loss: ", "expected ", "fix: ")),
    ],
)
def test_a_fault_in_a_build_fails_with_the_lines_of_a_case(session: Session, name: str, lines: tuple[str, ...]) -> None:
    kind, _, text = session.said[name].partition(": AssertionError: ")
    assert kind == "failure", session.output
    said = text.splitlines()
    for pattern, line in zip(lines, said, strict=False):
        assert re.match(pattern, line), session.said[name]
    assert len(said) in (3, 4)


def test_what_cannot_be_compared_is_skipped_with_its_reason(session: Session) -> None:
    assert session.said["test_broken[NoTp]"] == "skipped: tp2 is not compared: no tensor parallelism here"
    assert re.match("skipped: needs 4096 ranks, and this machine has room for ", session.said["test_too_many_ranks"])
    assert session.said["test_ends[skip]"] == "skipped: no such kernel"


def test_a_function_that_fails_tells_its_rank(session: Session) -> None:
    raised, returned = session.said["test_ends[raise]"], session.said["test_ends[object]"]
    assert "rank 1: ValueError: rank one has no data\n" in raised and "rank 0" not in raised, raised
    assert 'test_fp8.py", line' in raised and "/harness/" not in raised, raised
    assert re.search(r"rank \d: TypeError: ends\(\) returned a object, which cannot go between processes", returned)
    assert session.said["test_ends[fine]"] == "passed", session.output


def test_bad_input_is_an_error_without_frames_of_the_harness(session: Session) -> None:
    assert "HarnessError: " in session.said["test_unknown_case"] and "Fix: " in session.said["test_unknown_case"]
    assert "harness/running/" not in session.output and "harness/matrix/" not in session.output, session.output
