"""Exported scripts and tests: one Python file without this project, with values of the case; and drafts of issues."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from harness.checks.catalogue import normalized
from harness.errors import HarnessError
from harness.jsonform import read_json
from harness.matrix.caseid import case_id, parse_case_id
from harness.plugins.bugs.bugfile import Bug, BugFile
from harness.plugins.bugs.export import (
    TEMPLATE,
    Exported,
    Neighbors,
    Proof,
    Script,
    constants,
    error_pattern,
    export,
    exported_case,
    exported_fault,
    script,
    script_outcome,
    what_detects,
    with_values,
)
from harness.plugins.bugs.pytest_file import OLDEST, color_of, formatted, models, pytest_file
from harness.plugins.bugs.sections import exported_sections, issue_markdown
from harness.plugins.bugs.trials import NamedCase
from harness.plugins.faults.faults import all_faults
from harness.report.sections import text_of
from harness.verdict import FailureSignature, Verdict
from tests.builders import a_finding, make_failure, make_result, run_of
from tests.privates import everything

FSDP_TP = "fsdp2-tp2-tensorwise-ag.fp8-dim.32-layers.1-heads.2-kvheads.2-ffn.32-v64-gb2-s1-f64"
SCALES = FailureSignature(kind="scales/amax", first_step=1)
CRASH = FailureSignature(kind="crash", what="RuntimeError: N is not N", first_step=1)
MISMATCH = FailureSignature(kind="crash", what="CollectiveMismatch: ranks disagree", first_step=1)
SCATTERED = FailureSignature(kind="graphs/rows", what="fused_scaled_matmul_reduce_scatter", first_step=1)
ATP = "atp2-tensorwise-tpstyle.fp8-graph-v2048-gb2-s1-b16"


def script_text(case: str, signature: FailureSignature) -> str:
    return script(exported_case(parse_case_id(case)), signature, title="it fails").text


parsed = functools.lru_cache(maxsize=8)(ast.parse)


def unknown_names(text: str) -> set[str]:
    """Names that are read and that nothing in the file binds."""
    nodes = everything(parsed(text))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {str(node.name) for node in nodes if isinstance(node, ast.ExceptHandler)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    return read - bound - set(dir(builtins)) - {"__name__"}


def values_of(text: str) -> dict[str, object]:
    """The values that are literals, by name, in their order."""
    literals: dict[str, object] = {}
    for node in parsed(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                literals[node.targets[0].id] = ast.literal_eval(node.value)
    return literals


@pytest.mark.parametrize("signature", [SCALES, CRASH, MISMATCH], ids=["scales", "crash", "mismatch"])
@pytest.mark.parametrize(
    "case",
    [
        FSDP_TP,
        "fsdp3-tensorwise-ag.fp8-v2048-gb3-s2-f64",
        "tp2-tensorwise-head.fp8-v2256-f64",
        "tp2-nosp-nolp-tensorwise-tpstyle.fp8-v2048-f32",
        "hsdp2x2-rowwise-ac.full-v2048-b16",
        "hsdp2x2-tensorwise-ag.fp8pre-ac.op-v2048-f64",
        "fsdp2-tensorwise-graph-v2048-b16",
        "tp2-rowwise-bias-v2048-b16",
    ],
)
def test_a_script_is_complete_and_is_the_template_with_other_values(case: str, signature: FailureSignature) -> None:
    text = script_text(case, signature)
    assert unknown_names(text) == set()
    assert "harness" not in text
    assert list(values_of(text)) == list(values_of(TEMPLATE.read_text()))
    values = re.compile(r"^[A-Z0-9_, ]+ = .*$", flags=re.MULTILINE)
    template, written = (values.sub("", source.split('"""', 2)[2]) for source in (TEMPLATE.read_text(), text))
    assert template == written


def test_a_script_has_the_values_of_the_case() -> None:
    values = values_of(script_text("hsdp2x2-tp2-rowwise-tpstyle.fp8-filter.wq-ac.layer2-bias-v2048-s2-b16", SCALES))
    assert values["MESH"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert (values["RECIPE"], values["NOT_CONVERTED"], values["FLOAT8_STYLES"]) == ("rowwise", ("wq", "output"), True)
    assert (values["CHECKPOINT"], values["CHECKPOINT_EVERY"], values["BIAS"]) == ("selective_layer", 2, True)
    assert (values["DTYPE"], values["MIXED_PRECISION"], values["VOCAB"], values["BATCH"]) == ("float32", True, 2048, 2)
    gathers = values_of(script_text("fsdp2-tensorwise-ag.fp8pre-pad-graph-v2048-f64", SCALES))
    assert gathers["FP8_ALL_GATHER"] and gathers["PRECOMPUTE"] and gathers["PAD_INNER_DIM"] and gathers["COMPILE"]
    plain = values_of(script_text("tp2-nosp-nolp-tensorwise-v2048-f32", SCALES))
    assert not plain["SEQUENCE_PARALLEL"] and not plain["LOSS_PARALLEL"] and plain["MESH"] == {"tp": 2}
    assert values_of(script_text("single-tensorwise-v2048-f32", SCALES))["MESH"] == {}
    waits = [
        values_of(script_text(f"tp2-{option}tensorwise-graph-v2048-f64", SCALES))["WAIT"] for option in ("", "nowait-")
    ]
    assert waits == [True, False]


def test_a_script_has_the_values_of_the_failure() -> None:
    crash = FailureSignature(kind="crash", what='ValueError: "a" is not N', first_step=3)
    values = values_of(script_text(FSDP_TP, crash))
    assert (values["DETECT"], values["STEPS"]) == ("crash", 3)
    assert re.search(str(values["ERROR"]), 'ValueError: "a" is not 17')
    assert values_of(script_text(ATP, SCATTERED))["MESH"] == {"tp": 2}
    assert values_of(script_text(FSDP_TP, SCALES))["ERROR"] == ""


@pytest.mark.parametrize(
    ("signature", "detects"),
    [(SCALES, "gradients"), (CRASH, "crash"), (MISMATCH, "mismatch"), (SCATTERED, "scattered")],
)
def test_each_kind_of_failure_is_detected_in_its_own_way(signature: FailureSignature, detects: str) -> None:
    assert what_detects(signature) == detects
    with_parity = FailureSignature(kind="traffic/amax-missing", what="tp")
    assert what_detects(with_parity, ["parity"]) == "gradients", "other failures of numbers, by their gradients"


def test_gradients_under_tp_are_compared_in_float32() -> None:
    assert exported_case(parse_case_id("tp2-tensorwise-v2048-b16")).train.dtype == "float32"
    assert exported_case(parse_case_id("tp2-rowwise-v2048-f64")).train.dtype == "bfloat16"
    assert exported_case(parse_case_id("fsdp2-tensorwise-v2048-b16")).train.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("case", "compares"),
    [
        ("fsdp2-tp2-rowwise-ac.full-v2048-b16", True),
        ("tp2-rowwise-v2048-f32", True),  # its matmuls write bfloat16
        ("tp2-rowwise-graph-v2048-b16", False),  # hooks would change the graphs
        ("tp2-tensorwise-v2048-b16", False),  # becomes float32
        ("hsdp2x2-rowwise-v2048-b16", False),
    ],
)
def test_linears_are_compared_where_tp_ranks_add_bfloat16(case: str, compares: bool) -> None:
    assert values_of(script_text(case, SCALES))["COMPARE_LINEARS"] == compares


@pytest.mark.parametrize("kind", ["hang", "traffic", "memory", "loss_vs_golden", "graphs"])
def test_what_a_script_cannot_tell_is_refused_by_name(kind: str) -> None:
    with pytest.raises(HarnessError, match=f"kind {kind} cannot be exported"):
        script_text("tp2-tensorwise-v2048-f32", FailureSignature(kind=kind, what="it is wrong"))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fsdp2-mxfp8-v2048-b16", r"MXFP8 cannot be exported: a script has no casts of blocks.*Fix: report"),
        (ATP, "async TP cannot be exported"),  # but for its scattered rows
        ("target.my_model-tp2-tensorwise-v2048-f32", "target my_model cannot be exported"),
    ],
)
def test_what_no_script_has_is_refused(case: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        script_text(case, SCALES)


@pytest.mark.parametrize(
    "axis", ["casts.i.ten", "accum2", "eval", "clip0.5", "ignore.half", "resume", "reduce.b16", "param.b16"]
)
def test_what_no_script_does_is_refused(axis: str) -> None:
    words = f"fsdp2-rowwise-{axis}-v2048" if axis.startswith("casts") else f"fsdp2-rowwise-v2048-s2-{axis}"
    dtype = {"clip0.5": "f64", "param.b16": "b16"}.get(axis, "f32")
    with pytest.raises(HarnessError, match=r"cannot be exported: .* Fix: export the case without"):
        exported_case(parse_case_id(f"{words}-{dtype}"))


def test_the_pattern_of_an_error_finds_it_with_other_numbers() -> None:
    pattern = error_pattern(normalized("RuntimeError: expected [16, 2] at rank 3, got (a + b) of 0x7f\nmore"))
    assert re.search(pattern, "RuntimeError: expected [32, 4] at rank 1, got (a + b) of 0x99")
    assert not re.search(pattern, "RuntimeError: expected [32, 4] at rank 1, got (a - b) of 0x99")


@pytest.mark.parametrize(
    ("output", "outcome"),
    [
        ("rank 1: fixed: x\n  expected  a\n  found     b\nrank 0: FAULT: y\n  expected  c\n", "FAULT"),
        ("rank 1: fixed\nrank 0: fixed\n", "fixed"),
        ("rank 1: fixed\nrank 0: cannot tell: x\n", "cannot tell"),
        ("Traceback\nImportError: torchao\n", "cannot tell"),
    ],
)
def test_the_outcome_of_a_script(output: str, outcome: str) -> None:
    assert script_outcome(output).outcome == outcome
    several = "rank 1: FAULT: y\nrank 0: fixed\nrank 2: FAULT: z\n"
    assert script_outcome(several) == ("FAULT", "rank 1: FAULT: y")  # the first that printed its outcome


@pytest.mark.parametrize("name", ["row_scales_of_another_rank", "one_gradient_lost", "loss_over_local_tokens"])
def test_a_planted_fault_that_needs_the_harness_is_refused(name: str) -> None:
    with pytest.raises(HarnessError, match="cannot be exported: it needs harness"):
        exported_fault(name)


@pytest.mark.plugin("faults")
def test_every_planted_fault_is_a_file_or_refused() -> None:
    files = 0
    assert "harness" not in exported_fault("amax_without_abs")
    for name in all_faults():
        with contextlib.suppress(HarnessError):
            text = exported_fault(name)
            files += 1
            assert unknown_names(text) == set(), name
    assert files >= 98


pytestmark = pytest.mark.programs

FILES = {
    "gradients": (FSDP_TP, SCALES),
    "row gradients": ("tp2-rowwise-v2048-s1-b16", SCALES),
    "precomputed": ("hsdp2x2-tensorwise-ag.fp8pre-v2048-f64", FailureSignature(kind="scales/amax", first_step=2)),
    "float8 styles": ("tp2-nosp-nolp-tensorwise-tpstyle.fp8-v2048-f32", SCALES),
    "eight ranks": ("hsdp2x2-tp2-rowwise-ac.full-v2048-b16", SCALES),
    "crash": ("tp2-nowait-tensorwise-graph-v2048-s2-f64", CRASH),
    "quotes": (
        "tp2-nowait-tensorwise-graph-v2048-s2-f64",
        FailureSignature(kind="crash", what="AttributeError: 'Tensor' has no attribute '_local_tensor'", first_step=1),
    ),
    "one rank": ("single-tensorwise-v2048-gb1-sl40-s2-f64", CRASH),
    "mismatch": ("fsdp3-tensorwise-ag.fp8-v2048-gb6-s2-f64", MISMATCH),
    "scattered": (ATP, SCATTERED),
}


@functools.cache
def file(kind: str, model: str = "one small MLP") -> str:
    case, signature = FILES[kind]
    values = dict(models(constants(exported_case(parse_case_id(case)), signature)))[model]
    return pytest_file(values, head='"""It fails.\n\nA, B.\nIt fails with C.\n"""')


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_complete(kind: str) -> None:
    text = file(kind)
    assert unknown_names(text) == set()
    assert "harness" not in text
    defined = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert sum(name.startswith("test_") for name in defined) == 1


@pytest.mark.parametrize("kind", ["float8 styles", "mismatch"])
def test_a_file_is_formatted(kind: str) -> None:
    assert formatted(file(kind)) == file(kind)


def test_a_file_has_the_functions_that_its_check_calls() -> None:
    small, whole = file("gradients"), file("gradients", "the model of the case")
    assert "ATTENTION = False" in small and "ATTENTION = True" in whole and "LOSS_PARALLEL = True" in whole
    assert "def farthest" in small and "Compare" not in small and "fused_scaled_matmul_reduce_scatter(" not in small
    assert "class Compare" in file("mismatch") and "farthest" not in file("mismatch")
    assert not any("def main" in file(kind) or "sys.argv" in file(kind) for kind in FILES)
    linears = file("row gradients", "the model of the case, and each of its linears")
    assert unknown_names(linears) == set() and "COMPARE_LINEARS = True" in linears


def test_constants_get_values_and_keep_their_comments() -> None:
    source = 'ONE = 1\nNAME = "x"  # why\nOTHER = 2\n    ONE = 3\n'
    values = {"ONE": 7, "NAME": 'a "b"'}
    assert with_values(source, values) == 'ONE = 7\nNAME = "a \\"b\\""  # why\nOTHER = 2\n    ONE = 3\n'


@pytest.mark.parametrize(
    ("output", "color", "text"),
    [
        (".  [100%]\n1 passed in 3.21s\n", "green", "1 passed in 3.21s"),
        (
            "E   Traceback\nE   AssertionError: it is 0.2\n=== short\n1 failed in 3.21s\n",
            "red",
            "AssertionError: it is 0.2",
        ),
        ("E   test_x.Mismatch: ['a', 'b']\n1 failed, 2 warnings in 3.21s\n", "red", "test_x.Mismatch: ['a', 'b']"),
        ("SKIPPED [1] test_x.py:9: no torchao\n1 skipped in 0.1s\n", "cannot tell", "no torchao"),
        ("ERROR test_x.py\n1 error in 0.1s\n", "cannot tell", "1 error"),
        ("No module named pytest\n", "cannot tell", "No module named pytest"),
    ],
)
def test_the_color_of_a_run(output: str, color: str, text: str) -> None:
    answer = color_of(output)
    assert answer[0] == color
    assert text in answer[1]


def test_the_oldest_versions_are_those_of_this_project() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    assert [f"{name}>={version}" for name, version in OLDEST.items()] == project["project"]["optional-dependencies"][
        "train"
    ]


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


def test_neighbors_are_a_table(tmp_path: Path) -> None:
    file = tmp_path / "shrunk.json"
    file.write_bytes(SHRUNK)
    neighbors = read_json(file, Neighbors, command="bug shrink --json").needed
    text = issue_markdown(EXPORTED, None, versions=VERSIONS, device="CPU ranks", neighbors=neighbors)
    assert "| nothing | scales/amax in wq, from step 1 on |" in text
    assert "| tp = 1 | none: it passes |\n| dp_shard = 1 | crash: a \\| b |" in text


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
