"""The history of a case: what changed together with what, and what changed although nothing did."""

from __future__ import annotations

import json
import math
import time

import pytest
from msgspec.structs import replace

from harness.jsonform import to_json
from harness.project import Project
from harness.report.case import sparkline
from harness.report.runs import (
    History,
    histories,
    histories_sections,
    history_document,
    history_sections,
    history_table,
)
from harness.report.sections import text_of
from harness.result import CaseResult, Curve, Environment, Measured, RunStart, Sent
from harness.running.stored import import_results, read_stored, runs_before, runs_of
from harness.store import RunStore
from harness.verdict import Verdict
from tests.builders import make_attempt, make_cast_range, make_result, make_results, make_trace, run_of, with_facts

CASE, OTHER = "tp2-rowwise-v2048-f32", "single-rowwise-v2048-f32"
HERE = Environment(packages={"torch": "2.12.0"}, device="cpu", cpu="x" * 200, commit="a" * 40)
NEXT = replace(HERE, packages={"torch": "2.13.0"}, commit=f"{'b' * 40}-dirty", changes="c" * 16)
NUMBERS = Measured(
    curves={"case": Curve(losses=(8.0, 7.5), grad_norms=(1.0, 1.0))},
    loss_distance=0.001,
    wire={"all_gather in uint8 along tp": Sent(calls=2, payload_bytes=1_200_000)},
    saved_bytes=2048,
    digests={"casts": "1"},
)


def result(
    verdict: Verdict = Verdict.PASSED, case_id: str = CASE, *, seconds: float = 1.0, **numbers: object
) -> CaseResult:
    attempts = (make_attempt(verdict, wall_s=seconds),)
    return make_result(case_id, verdict, attempts=attempts, measured=replace(NUMBERS, **numbers))


def add(project: Project, *results: CaseResult, environment: Environment | None = HERE) -> None:
    store = RunStore(project.new_run())
    minute = len(project.stored_runs())
    ids = tuple(case.case_id for case in results)
    store.begin(RunStart(cases=ids, environment=environment, started=f"2026-01-01T00:{minute:02}:00+00:00"))
    for case in results:
        store.append(case)


def history(project: Project, case_id: str = CASE) -> History:
    (case_history,) = histories(list(runs_of(project))[::-1], lambda name: name == case_id)
    return case_history


def test_the_history_of_a_page_ends_with_its_run(project: Project) -> None:
    for number in range(1, 4):
        add(project, result(saved_bytes=number))
    add(project, result(case_id=OTHER))
    second = read_stored(project.stored_runs()[1])
    minutes = [run.start.started[14:16] for run in runs_before(project, second, most=20)]
    assert minutes == ["01", "02"]
    assert len(runs_before(project, second, most=1)) == 1
    assert runs_before(project, with_facts(second, started="2026-01-01T00:00:09+00:00"), most=20) == []
    listing = history_table(history(project))
    assert [row[listing.verdict or 0] for row in listing.rows] == ["passed"] * 3
    add(project, result(), environment=NEXT)
    assert history_table(history(project)).rows[-1][-1] == (
        "now torch 2.12.0 -> 2.13.0, uncommitted changes; changed with it: saved bytes"
    )
    assert [row[-1] for row in listing.rows] == ["", *["NONDETERMINISTIC, in the same environment: saved bytes"] * 2]


@pytest.mark.parametrize(
    "cases",
    [
        (result(), result(seconds=3.0)),
        (result(loss_distance=math.nan), result(loss_distance=math.nan)),
        (result(), result(wire={}, saved_bytes=None, digests={"parameters": "1"})),
        (result(), replace(result(), measured=None), result()),
    ],
    ids=["equal", "NaN stays NaN", "less was measured", "nothing was measured"],
)
def test_runs_that_have_nothing_to_tell(project: Project, cases: tuple[CaseResult, ...]) -> None:
    for case in cases:
        add(project, case)
    case_history = history(project)
    assert not any(moment.moved for moment in case_history.moments)
    assert not case_history.is_flaky and not case_history.is_nondeterministic and case_history.last_change is None


def test_two_verdicts_in_one_environment_are_flaky(project: Project) -> None:
    add(project, result())
    add(project, result(Verdict.HANG), environment=NEXT)
    assert not history(project).is_flaky
    add(project, result(Verdict.NUMERIC))
    assert history(project).is_flaky


def test_retries_and_machines_that_fail_are_not_flaky(project: Project) -> None:
    twice = replace(result(), attempts=(make_attempt(Verdict.INFRA), make_attempt()))
    for cases in ([result(Verdict.CRASH), result()], [twice], [result(Verdict.INFRA)]):  # the last one of a run counts
        add(project, *cases)
    assert [moment.case.verdict for moment in history(project).moments] == [
        Verdict.PASSED,
        Verdict.PASSED,
        Verdict.INFRA,
    ]
    assert not history(project).is_flaky


def test_runs_of_unknown_environments_are_never_compared(project: Project) -> None:
    add(project, result(), environment=None)
    add(project, result(Verdict.CRASH, digests={"casts": "2"}), environment=None)
    case_history = history(project)
    assert not case_history.is_flaky and not case_history.is_nondeterministic


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"digests": {"casts": "2"}}, "casts"),
        ({"curves": {"case": Curve(losses=(8.0, math.nan), grad_norms=(1.0, 1.0))}}, "losses"),
        ({"curves": {"case": Curve(losses=(8.0, 7.5), grad_norms=(1.0, 2.0))}}, "gradient norms"),
        ({"wire": {"all_gather in uint8 along tp": Sent(calls=3, payload_bytes=1_200_000)}}, "collectives"),
        ({"saved_bytes": 2049}, "saved bytes"),
        ({"loss_distance": 0.002}, "loss distance"),
    ],
)
def test_an_exact_number_that_moves_is_named(project: Project, change: dict[str, object], name: str) -> None:
    add(project, result())
    add(project, result(**change))
    case_history = history(project)
    assert case_history.moments[1].moved == (name,) and case_history.is_nondeterministic
    assert f"NONDETERMINISTIC, in the same environment: {name}" in text_of(history_sections(case_history))


def test_what_moves_with_the_environment_is_told_with_it(project: Project) -> None:
    add(project, result())
    add(project, result(saved_bytes=4096), environment=NEXT)
    case_history = history(project)
    assert case_history.moments[1].moved == ("saved bytes",) and not case_history.is_nondeterministic
    text = text_of(history_sections(case_history))
    assert "now torch 2.12.0 -> 2.13.0, uncommitted changes; changed with it: saved bytes" in text
    assert "bbbbbbbbb+" in text


def test_a_run_is_compared_with_the_last_one_in_its_own_environment(project: Project) -> None:
    """Back to the first environment: equal to the first run, although not to the one before."""
    for environment, saved_bytes in ((HERE, 1), (NEXT, 2), (HERE, 1)):
        add(project, result(saved_bytes=saved_bytes), environment=environment)
    assert [moment.moved for moment in history(project).moments] == [(), ("saved bytes",), ()]
    add(project, result(saved_bytes=3), environment=NEXT)
    assert history(project).is_nondeterministic


def test_on_a_gpu_only_counts_repeat(project: Project) -> None:
    gpu = replace(HERE, device="NVIDIA H200")
    add(project, result(), environment=gpu)
    add(project, result(digests={"casts": "2"}, saved_bytes=1), environment=gpu)
    assert history(project).moments[1].moved == ("saved bytes",)


def test_the_last_runs_alone_are_asked_for(project: Project) -> None:
    for number in range(4):
        add(project, result(saved_bytes=number))
    (case_history,) = histories(list(runs_of(project))[::-1], lambda name: True, most=2)
    assert [moment.case.measured and moment.case.measured.saved_bytes for moment in case_history.moments] == [2, 3]
    assert case_history.moments[0].moved == ()


def test_imported_runs_are_part_of_the_history(project: Project) -> None:
    """And say the same as those of this machine."""
    for number, case in enumerate((result(), result(Verdict.HANG, seconds=2.0))):
        import_results(project, make_results(case, environment=HERE, started=f"2025-01-01T00:00:0{number}+00:00"))
    add(project, result(), environment=NEXT)
    case_history = history(project)
    assert [moment.case.verdict for moment in case_history.moments] == [Verdict.PASSED, Verdict.HANG, Verdict.PASSED]
    assert [moment.case.seconds for moment in case_history.moments] == [1.0, 2.0, 1.0]
    assert case_history.moments[0].case.measured == case_history.moments[2].case.measured and case_history.is_flaky


def test_a_damaged_line_and_a_case_that_was_not_run_are_left_out(project: Project) -> None:
    add(project, result(case_id=OTHER), result())
    (run,) = runs_of(project)
    run.path.write_bytes(run.path.read_bytes()[:-40])
    assert RunStore(run.path).numbers(lambda _: True).keys() == {OTHER}
    skipped = make_result(CASE, Verdict.NOT_RUN, attempts=())
    import_results(project, make_results(skipped))
    assert not histories(list(runs_of(project)), lambda name: name == CASE)


# Text


@pytest.mark.parametrize("width", [60, 200])
def test_the_text_fits_the_terminal(project: Project, width: int) -> None:
    add(project, result())
    add(project, result(Verdict.UNEXPECTED_PASS), environment=replace(NEXT, cpu="y" * 200))
    lines = text_of(history_sections(history(project)), width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert ("started" in lines[0]) == (width == 200)
    assert any(line.startswith("loss apart  ▁▁") for line in lines) and any("1.144 MiB" in line for line in lines)


def test_a_summary_says_how_often_and_what_last_and_bars_are_from_the_lowest_to_the_highest(project: Project) -> None:
    add(project, result(), result(case_id=OTHER))
    add(project, result(Verdict.HANG, saved_bytes=1), result(case_id=OTHER))
    all_histories = histories(list(runs_of(project))[::-1], lambda name: True)
    first, second = text_of(histories_sections(all_histories)).splitlines()
    assert first.startswith(f"{CASE}  ") and "2 runs  1 passed, 1 hang  " in first
    assert first.endswith("FLAKY NONDETERMINISTIC  last change 2026-01-01: hang; saved bytes")
    assert second.split() == [OTHER, "2", "runs", "2", "passed", "-", "no", "change"]
    narrow = text_of(histories_sections(all_histories), width=60).splitlines()
    assert narrow[0] == CASE and all(len(line) <= 60 for line in narrow)
    assert " ".join(" ".join(narrow[1:4]).split()).startswith(
        "2 runs, 1 passed, 1 hang, FLAKY NONDETERMINISTIC last change"
    )
    assert sparkline([0.0, 3.5, 7.0, None, math.nan, math.inf]) == "▁▅█ !!"
    assert (sparkline([2.0, 2.0]), sparkline([])) == ("▁▁", "")


def test_json_has_every_run(project: Project) -> None:
    add(project, result(loss_distance=math.nan))
    document = json.loads(to_json(history_document(history(project))))
    assert (document["case"], document["flaky"], document["verdicts"]) == (CASE, False, {"passed": 1})
    assert document["runs"][0]["numbers"]["loss_distance"] == "NaN"


# Speed


@pytest.fixture(scope="module", params=[20, pytest.param(100, marks=pytest.mark.sweep)])
def large(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Project:
    """So many runs of 100 cases, each with a trace and the ranges of 84 operands."""
    root = tmp_path_factory.mktemp("large")
    project = Project(root=root, state=root / "state")
    ranges = tuple(
        make_cast_range(fqn=f"layers.{at}.attention.wq", amax=0.1, scale_min=1.1, scale_max=2.2, flushed=0.0)
        for at in range(84)
    )
    run = run_of(make_trace(losses=[8.0] * 5))
    cases = [
        replace(result(case_id=f"single-rowwise-v{2048 + 16 * at}-f32", casts=ranges), run=run) for at in range(100)
    ]
    add(project, *cases)
    (first,) = project.stored_runs()
    for _ in range(request.param - 1):
        path = project.new_run()
        path.unlink()
        path.hardlink_to(first)
    return project


def test_many_runs_of_a_hundred_cases_are_read_quickly(large: Project) -> None:
    runs = len(large.stored_runs())
    started_s = time.process_time()
    (one_history,) = histories(list(runs_of(large))[::-1], lambda name: name == "single-rowwise-v2064-f32")
    one_s = time.process_time() - started_s
    assert len(one_history.moments) == runs
    started_s = time.process_time()
    every = histories(list(runs_of(large))[::-1], lambda name: True)
    all_s = time.process_time() - started_s
    assert len(every) == 100 and not any(
        case_history.is_flaky or case_history.is_nondeterministic for case_history in every
    )
    assert one_s < 0.01 * runs and all_s < 0.02 * runs, "0.1 and 0.6 s for 100 runs on a busy core"
