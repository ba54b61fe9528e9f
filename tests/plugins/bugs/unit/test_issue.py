"""The draft of an issue: what was expected and found, and which neighbours fail."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.checks.failure_signature import normalized
from harness.errors import HarnessError
from harness.matrix.caseid import case_id, parse_case_id
from harness.plugins.bugs.bugfile import Bug, BugFile
from harness.plugins.bugs.export import Exported, Proof, Script, export, read_neighbours
from harness.plugins.bugs.sections import exported_sections, issue_markdown
from harness.plugins.bugs.trials import NamedCase
from harness.report.sections import text_of
from harness.verdict import FailureSignature, Verdict
from tests.builders import a_finding, make_failure, make_result, run_of

SIGNATURE = FailureSignature(kind="scales/amax", where=("wq",), first_step=1)
FINDING = a_finding(
    check="scales", message="scale does not match: first in wq", expected="2 = 448 / amax 224", found="4"
)
EXPORTED = Exported(
    title="One scale for each TP rank",
    case_id="tp2-tensorwise-v2048-s1-f32",
    signature=SIGNATURE,
    finding=FINDING,
    script=Script(text="a\nb\n", ranks=2),
    file=Path("issue/bug.py"),
    patches=("/somewhere/fault.py:plant",),
)
VERSIONS = {"torch": "2.13.0", "torchao": "0.18.0"}
SHRUNK = b"""{"case": "x", "needed": [
  {"changes": {"tp": 1}, "same": false,
   "result": {"case_id": "single", "verdict": "passed", "signature": null, "message": "", "cpu_s": 1.0}},
  {"changes": {"dp_shard": 1}, "same": false,
   "result": {"case_id": "tp2", "verdict": "crash", "signature": {"kind": "crash", "what": "a | b"}, "message": "m",
              "cpu_s": 1.0}}]}"""


def test_the_draft_says_versions_expected_found_and_the_command() -> None:
    text = issue_markdown(EXPORTED, Proof("FAULT", "rank 0: FAULT: it is wrong"), versions=VERSIONS, device="CPU ranks")
    assert text.startswith("# One scale for each TP rank\n")
    assert "- torch 2.13.0\n- torchao 0.18.0\n- CPU ranks" in text
    assert "- expected: 2 = 448 / amax 224\n- found: 4" in text
    assert "torchrun --nproc-per-node 2 bug.py fault.py:plant" in text
    assert "rank 0: FAULT: it is wrong" in text
    assert "What fails" not in text


def test_neighbours_are_a_table(tmp_path: Path) -> None:
    file = tmp_path / "shrunk.json"
    file.write_bytes(SHRUNK)
    text = issue_markdown(EXPORTED, None, versions=VERSIONS, device="CPU ranks", neighbours=read_neighbours(file))
    assert "| nothing | scales/amax in wq, from step 1 on |" in text
    assert "| tp = 1 | none: it passes |\n| dp_shard = 1 | crash: a \\| b |" in text


def test_a_file_that_is_no_shrink_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]")
    with pytest.raises(HarnessError, match="give what `bug shrink` wrote"):
        read_neighbours(file)


def test_a_refusal_has_no_finding() -> None:
    refusal = EXPORTED._replace(finding=None, signature=msgspec.structs.replace(SIGNATURE, kind="crash"))
    assert "no kernel can run this case" in issue_markdown(refusal, None, versions=VERSIONS, device="CPU ranks")


NAMED = NamedCase(parse_case_id("fsdp2-tp2-rowwise-dim.64-layers.1-heads.4-kvheads.4-ffn.64-v2048-gb2-s1-b16"), None)


def drafted(folder: Path, message: str, named: NamedCase = NAMED, known: dict[str, str] | None = None) -> str:
    """The draft for a case whose first rank raised this."""
    normal_message = normalized(message)
    failed = make_result(
        case_id(NAMED.case),
        Verdict.CRASH,
        findings=(a_finding(check="engine", message=message, expected="every rank returns", found="raised"),),
        run=run_of(make_failure(0, "Aborted", consequence=True), make_failure(1, message, phase="step 3")),
        failure_signature=FailureSignature(kind="crash", what=normal_message, first_step=3),
    )
    exported = export(named, failed, (), folder, known or {})
    assert len(exported.file.name) <= 45
    return issue_markdown(exported, None, versions=VERSIONS, device="CPU ranks")


def test_a_crash_is_told_in_the_words_of_the_library(tmp_path: Path) -> None:
    text = drafted(tmp_path, "RuntimeError: got 17 rows")
    assert text.startswith("# RuntimeError: got 17 rows (float8 rowwise, FSDP2, TP)\n")
    assert "- expected: it trains\n- found: RuntimeError: got 17 rows (rank 1, step 3)" in text
    assert "## Known" not in text and "every rank returns" not in text


def test_a_mismatch_has_no_exception_of_ours_and_no_placeholder(tmp_path: Path) -> None:
    ours = "CollectiveMismatch: ranks of one process group disagree: group rank 1 calls all_gather of 64 bytes, more"
    text = drafted(tmp_path, ours)
    assert "CollectiveMismatch" not in text and "RANKS" not in text and " N " not in text
    assert text.startswith("# ranks of one group call different collectives: group rank 1 calls all_gather of 64 bytes")
    assert "- expected: all ranks of a group call the same collective, of the same size\n" in text


def test_the_report_and_the_known_record_are_linked(tmp_path: Path) -> None:
    link = "https://github.com/pytorch/ao/issues/9"
    bug = BugFile(
        id="ao-9", where="", bug=Bug(title="it fails", link=link, status="open", symptom="crash"), case=NAMED.case
    )
    text = drafted(tmp_path, "ValueError: x", NAMED._replace(bug=bug), {"record": "the cause (https://example.org/1)"})
    assert text.startswith("# it fails\n")
    assert f"## Known\n\n- {link}\n- record: the cause (https://example.org/1)\n" in text


def test_a_script_that_shows_nothing_is_said_to() -> None:
    assert "does not show the fault" in text_of(exported_sections(EXPORTED, Proof("fixed", "rank 0: fixed")))
    assert "does not show the fault" not in text_of(exported_sections(EXPORTED, Proof("FAULT", "rank 0: FAULT")))
