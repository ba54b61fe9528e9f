"""The commands that read results of others: their exit codes, and what a file brings is inert in what they print."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.cli.main import main
from harness.project import Project, find_project
from harness.result import CaseResult
from harness.running.stored import import_results, read_results
from harness.store import RunStore, run_lines
from harness.verdict import Verdict
from tests.builders import a_finding, make_measured, make_result, make_results
from tests.unit.test_printable import assert_inert

A, B = "tp2-rowwise-v2048-s2-b16", "fsdp2-tensorwise-v2048-s2-b16"
TEXT = "\n::add-mask::s\x1b[31m\u202e\u2028##[error]section_start:1:x\r\x1b[0K"


@pytest.fixture(autouse=True)
def _here(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("FP8_HARNESS_STATE", str(project.state))


def case(name: str, verdict: Verdict = Verdict.PASSED, *, message: str = "boom") -> CaseResult:
    findings = () if verdict.good else (a_finding(check="finite", message=message, verdict=verdict),)
    return make_result(name, verdict, findings=findings, measured=make_measured(), checks=("finite",))


def file(path: str, /, *cases: CaseResult, **facts: object) -> str:
    Path(path).write_bytes(run_lines(make_results(*cases, **facts)))
    return path


@pytest.mark.plugin("release")
@pytest.mark.parametrize(
    ("before", "after", "code", "word"),
    [
        ([case(A)], [case(A)], 0, "GO"),
        ([case(A), case(B)], [case(A), case(B, Verdict.CRASH)], 1, "NO-GO"),
        ([case(A, Verdict.CRASH)], [case(A, Verdict.CRASH)], 6, "NOT COMPARED"),
        ([case(A, Verdict.INFRA)], [case(A, Verdict.INFRA)], 6, "NOT COMPARED"),
        ([case(A)], [case(B)], 6, "NOT COMPARED"),
    ],
)
def test_compare_has_an_exit_code_for_nothing_compared(
    before: list[CaseResult], after: list[CaseResult], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = file("before.json", *before), file("after.json", *after)
    assert main(["compare", *files, "--html", "gate.html", "--markdown", "gate.md"]) == code
    assert capsys.readouterr().out.startswith(f"{word}: after.json against before.json\n")
    assert Path("gate.md").read_text().startswith(f"## {word}: ") and word in Path("gate.html").read_text()


def test_what_a_file_brings_is_inert_in_what_commands_print(capfd: pytest.CaptureFixture[str]) -> None:
    bad = replace(case(A, Verdict.CRASH, message=TEXT), command=TEXT, expectation=TEXT, quarantined=TEXT)
    facts = {"started": TEXT, "name": TEXT, "left_out": (TEXT,), "argv": (TEXT,), "provenance": {TEXT: TEXT}}
    good, evil = file("good.json", case(A), case(B)), file("evil.json", bad, case(B), case(TEXT), **facts)
    Path(f"{TEXT.replace('/', '')}.json").write_bytes(b"{}")
    for words in (
        ["show", evil], ["show", evil, A], ["show", evil, TEXT], ["compare", good, evil], ["runs", "import", evil],
        ["runs", "import", evil], ["runs", "list"], ["runs", "history"], ["runs", "history", TEXT],
        ["runs", "merge", "out.json", good, evil],
        ["runs", "merge", "out.json", good, evil, "--mixed"], ["show", f"{TEXT}.json"], ["runs", "remove", TEXT],
    ):  # fmt: skip
        main(words)
        said = "".join(capfd.readouterr())
        assert said, words
        assert_inert(said)


@pytest.mark.plugin("release")
def test_every_reader_names_a_damaged_line(capfd: pytest.CaptureFixture[str]) -> None:
    store = RunStore(find_project().new_run())
    run = make_results(case(A), case(B), started="2026-01-01T00:00:00+00:00")
    store.begin(replace(run.start, cases=(A, B)))
    for result in run.results:
        store.append(result)
    store.path.write_bytes(store.path.read_bytes().replace(b'"losses":[8.0', b'"losses":[9.0', 1))
    named = f"{store.path}:2: not a line of results: its checksum is another one"
    for words in (
        ["show"],
        ["compare", "last", "last"],
        ["runs", "list"],
        ["runs", "history"],
        ["runs", "merge", "o.json", "last"],
    ):
        main(words)
        said = "".join(capfd.readouterr())
        assert named in said, (words, said)
    store.finish(run)
    assert main(["show"]) == 2 and named in capfd.readouterr().err, "what ended has a result of every case"


@pytest.mark.plugin("release")
def test_an_import_of_the_future_takes_over_nothing(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    for name in (A, B):
        store = RunStore(project.new_run())
        run = make_results(case(name), started="2026-01-01T00:00:00+00:00")
        store.begin(replace(run.start, cases=(name,)))
        store.append(run.results[0])
        store.finish(run)
    import_results(project, read_results(Path(file("f.json", case(A, Verdict.CRASH), started="2099-01-01", name="f"))))
    assert main(["show"]) == 0 and B in capfd.readouterr().out
    assert main(["compare", "last~1", "last"]) == 6 and main(["show", "f"]) == 0


@pytest.mark.plugin("bugs")
def test_what_a_report_says_is_inert_in_what_bug_prints(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "torchrun --nproc_per_node 2 train.py --parallelism.tensor_parallel_degree=2 --quantize.linear.float8"
    words = (
        f"# {TEXT}\n\nhttps://github.com/pytorch/ao/issues/99999\n{TEXT}\n\n```\n{flags} --float8.{TEXT[1:]}=1\n```\n"
    )
    Path("report.md").write_text(words)
    for line in (["import", "report.md", "--id", "evil", "--dry-run"], ["import", "report.md", "--id", "evil"]):
        main(["bug", *line])
        assert_inert("".join(capfd.readouterr()))
    main(["bug", "list"])
    said = "".join(capfd.readouterr())
    assert "evil" in said
    assert_inert(said)
