"""Reports of a run that ended: `report` and `show`, and the page that `run --html` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from tests.acceptance.conftest import Inside
from tests.acceptance.fake_program import RAISES
from tests.fork_servers import ForkServers
from tests.lines import lines_of, read_run, tree

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command


@pytest.fixture
def project(project: Command, warm: ForkServers) -> Inside:
    return Inside(project.folder, fork_servers=warm)


@pytest.fixture(scope="module")
def ran(shared: Command, warm: ForkServers) -> Inside:
    """A project in which a tier ran under a name, and then a case that raises."""
    folder, shared = shared.folder, Inside(shared.folder, fork_servers=warm)
    done = shared.run("run", "smoke", "--name", "release", "--html", str(folder / "run.html"), "--json", "run.json")
    assert done.returncode == 0, done.stderr
    shared.planted("raises", RAISES)
    assert shared.run("run", "raises").returncode == 1
    return shared


def test_run_writes_the_page_that_report_writes_and_its_results_are_json_and_nothing_else(ran: Inside) -> None:
    assert ran.run("show", "release", "--html", "named.html").returncode == 0
    assert ran.run("show", "last~1", "--html", "before.html").returncode == 0
    assert ran.run("show", "run.json", "--html", "file.html").returncode == 0
    pages = [(ran.folder / f"{name}.html").read_text() for name in ("run", "named", "before")]
    assert pages[0].startswith("<!doctype html>") and "<title>good: fp8-harness release</title>" in pages[0]
    assert pages[0] == pages[1] == pages[2]
    assert "<title>good: fp8-harness release</title>" in (ran.folder / "file.html").read_text()
    done = ran.run("show", "release", "--json", "-")
    assert tree(done.stdout) == read_run(ran.folder / "run.json") and done.stderr == ""


def test_the_coverage_is_that_of_the_tiers_that_ran_whole(project: Inside) -> None:
    axes = 'base = {steps = 3, loss_tolerance = 0.05}\naxes = {recipe = ["bf16", "tensorwise"], dp_shard = [1, 2]}'
    project.tier("grid", f'[[matrix]]\nname = "m"\n{axes}\n')
    done = project.run("run", "grid", "--html", "grid.html")
    assert "rules that exclude" not in done.stderr and done.returncode == 0, done.stdout + done.stderr
    assert "combinations in grid" in (project.folder / "grid.html").read_text()
    assert project.run("run", "grid", "--select", "dp_shard=2", "--html", "part.html").returncode == 0
    assert "combinations in grid" not in (project.folder / "part.html").read_text()


def test_a_page_has_the_history_of_a_run_that_is_stored(project: Inside) -> None:
    for name in ("v1", "v2"):
        assert project.run("run", "smoke", "--name", name, "--html", f"{name}.html", "--json", "v.json").returncode == 0
    pages = [(project.folder / f"{name}.html").read_text() for name in ("v1", "v2")]
    assert ['"history":' in page for page in pages] == [False, True]
    foreign = read_run(project.folder / "v.json") | {"started": "2020-01-01T00:00:00+00:00"}
    (project.folder / "v.json").write_text(lines_of(foreign))
    assert project.run("show", "v.json", "--html", "foreign.html").returncode == 0
    assert '"history":' not in (project.folder / "foreign.html").read_text()


def test_other_forms_of_a_run_that_ended(ran: Inside) -> None:
    assert ran.run("show", "--junit", "out.xml", "--markdown", "out.md").returncode == 0
    suite = ElementTree.parse(ran.folder / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    assert "fp8-harness: not good" in (ran.folder / "out.md").read_text()
    done = ran.run("show")
    assert done.returncode == 0 and "1 case: 1 crash" in done.stdout and "\n  reproduce: " in done.stdout


def test_show_tells_one_case_or_lists_what_it_may_mean(ran: Inside) -> None:
    done = ran.run("show", "tensorwise")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert "-tensorwise-" in first and second.startswith("  crash; 2 ranks")
    assert f"fp8-harness run {first}" in done.stdout
    assert "█" in ran.run("show", "release", "single-tensorwise").stdout
    done = ran.run("show", "release", "rowwise")
    assert done.returncode == 2 and "several cases of the run have this" in done.stderr
    ids = [case["id"] for case in read_run(ran.folder / "run.json")["cases"] if "rowwise" in case["id"]]
    assert len(ids) == 2 and all(name in done.stderr for name in ids)
    assert "the run has no such case" in ran.run("show", "nothing").stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("show", "nowhere.json"), "there are no such results"),
        (("show", "--html", "no/such/out.html"), "there is no such folder"),
        (("show", "--mutations", "run.json"), "adds to --html"),
        (("show", "--html", "x.html", "--mutations", "run.json"), "not written by `dev mutate --json`"),
        (("show", "--html", "x.html", "--conformance", "run.json"), "not written by `dev conformance --json`"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_written_is_one_line(ran: Inside, arguments: tuple[str, ...], said: str) -> None:
    done = ran.run(*arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not Path(ran.folder / "x.html").exists()
