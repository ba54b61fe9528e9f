"""The draft of an issue: what was expected and found, and which neighbours fail."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.bugs.export import Exported, Proof, Script, read_neighbours
from harness.errors import HarnessError
from harness.report.bugs import exported_sections, issue_markdown
from harness.report.sections import text_of
from harness.verdict import FailureSignature
from tests.builders import a_finding

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


def test_a_script_that_shows_nothing_is_said_to() -> None:
    assert "does not show the fault" in text_of(exported_sections(EXPORTED, Proof("fixed", "rank 0: fixed")))
    assert "does not show the fault" not in text_of(exported_sections(EXPORTED, Proof("FAULT", "rank 0: FAULT")))
