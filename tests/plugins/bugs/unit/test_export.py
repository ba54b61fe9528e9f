"""Exported scripts: one Python file without this project, with the values of the case on top."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re

import pytest

from harness.checks.failure_signature import normalized
from harness.errors import HarnessError
from harness.matrix.caseid import parse_case_id
from harness.plugins.bugs.export import (
    TEMPLATE,
    error_pattern,
    exported_case,
    exported_fault,
    script,
    script_outcome,
    what_detects,
)
from harness.plugins.faults.faults import all_faults
from harness.verdict import FailureSignature
from tests.privates import everything

FSDP_TP = "fsdp2-tp2-tensorwise-ag.fp8-dim.32-layers.1-heads.2-kvheads.2-ffn.32-v64-gb2-s1-f64"
SCALES = FailureSignature(kind="scales/amax", first_step=1)
CRASH = FailureSignature(kind="crash", what="RuntimeError: N is not N", first_step=1)
MISMATCH = FailureSignature(kind="crash", what="CollectiveMismatch: ranks disagree", first_step=1)
SCATTERED = FailureSignature(kind="graphs/rows", what="fused_scaled_matmul_reduce_scatter", first_step=1)
ATP = "atp2-tensorwise-tpstyle.fp8-graph-v2048-gb2-s1-b16"


def text_of(case: str, signature: FailureSignature) -> str:
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


def constants(text: str) -> dict[str, object]:
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
    text = text_of(case, signature)
    assert unknown_names(text) == set()
    assert "harness" not in text
    assert list(constants(text)) == list(constants(TEMPLATE.read_text()))
    values = re.compile(r"^[A-Z0-9_, ]+ = .*$", flags=re.MULTILINE)
    template, written = (values.sub("", source.split('"""', 2)[2]) for source in (TEMPLATE.read_text(), text))
    assert template == written


def test_a_script_has_the_values_of_the_case() -> None:
    values = constants(text_of("hsdp2x2-tp2-rowwise-tpstyle.fp8-filter.wq-ac.layer2-bias-v2048-s2-b16", SCALES))
    assert values["MESH"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert (values["RECIPE"], values["NOT_CONVERTED"], values["FLOAT8_STYLES"]) == ("rowwise", ("wq", "output"), True)
    assert (values["CHECKPOINT"], values["CHECKPOINT_EVERY"], values["BIAS"]) == ("selective_layer", 2, True)
    assert (values["DTYPE"], values["MIXED_PRECISION"], values["VOCAB"], values["BATCH"]) == ("float32", True, 2048, 2)
    gathers = constants(text_of("fsdp2-tensorwise-ag.fp8pre-pad-graph-v2048-f64", SCALES))
    assert gathers["FP8_ALL_GATHER"] and gathers["PRECOMPUTE"] and gathers["PAD_INNER_DIM"] and gathers["COMPILE"]
    plain = constants(text_of("tp2-nosp-nolp-tensorwise-v2048-f32", SCALES))
    assert not plain["SEQUENCE_PARALLEL"] and not plain["LOSS_PARALLEL"] and plain["MESH"] == {"tp": 2}
    assert constants(text_of("single-tensorwise-v2048-f32", SCALES))["MESH"] == {}
    waits = [
        constants(text_of(f"tp2-{option}tensorwise-graph-v2048-f64", SCALES))["WAIT"] for option in ("", "nowait-")
    ]
    assert waits == [True, False]


def test_a_script_has_the_values_of_the_failure() -> None:
    crash = FailureSignature(kind="crash", what='ValueError: "a" is not N', first_step=3)
    values = constants(text_of(FSDP_TP, crash))
    assert (values["DETECT"], values["STEPS"]) == ("crash", 3)
    assert re.search(str(values["ERROR"]), 'ValueError: "a" is not 17')
    assert constants(text_of(ATP, SCATTERED))["MESH"] == {"tp": 2}
    assert constants(text_of(FSDP_TP, SCALES))["ERROR"] == ""


@pytest.mark.parametrize(
    ("signature", "detects"),
    [(SCALES, "gradients"), (CRASH, "crash"), (MISMATCH, "mismatch"), (SCATTERED, "scattered")],
)
def test_each_kind_of_failure_is_detected_in_its_own_way(signature: FailureSignature, detects: str) -> None:
    assert what_detects(signature) == detects


def test_gradients_under_tp_are_compared_in_float32() -> None:
    with pytest.raises(HarnessError, match=r"MXFP8 cannot be exported: a script has no casts of blocks.*Fix: report"):
        exported_case(parse_case_id("fsdp2-mxfp8-v2048-b16"))
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
    assert constants(text_of(case, SCALES))["COMPARE_LINEARS"] == compares


@pytest.mark.parametrize("kind", ["hang", "traffic", "memory", "loss_vs_golden", "graphs"])
def test_what_a_script_cannot_tell_is_refused_by_name(kind: str) -> None:
    with pytest.raises(HarnessError, match=f"kind {kind} cannot be exported"):
        text_of("tp2-tensorwise-v2048-f32", FailureSignature(kind=kind, what="it is wrong"))


def test_other_failures_of_numbers_are_told_by_their_gradients() -> None:
    assert what_detects(FailureSignature(kind="traffic/amax-missing", what="tp"), ["parity"]) == "gradients"


def test_async_tp_is_refused_but_for_its_scattered_rows() -> None:
    with pytest.raises(HarnessError, match="async TP cannot be exported"):
        text_of(ATP, SCALES)


@pytest.mark.parametrize(
    "axis", ["casts.i.ten", "accum2", "eval", "clip0.5", "ignore.half", "resume", "reduce.b16", "param.b16"]
)
def test_what_no_script_does_is_refused(axis: str) -> None:
    words = f"fsdp2-rowwise-{axis}-v2048" if axis.startswith("casts") else f"fsdp2-rowwise-v2048-s2-{axis}"
    dtype = {"clip0.5": "f64", "param.b16": "b16"}.get(axis, "f32")
    with pytest.raises(HarnessError, match=r"cannot be exported: .* Fix: export the case without"):
        exported_case(parse_case_id(f"{words}-{dtype}"))


def test_a_target_of_ones_own_is_refused() -> None:
    with pytest.raises(HarnessError, match="target my_model cannot be exported"):
        text_of("target.my_model-tp2-tensorwise-v2048-f32", SCALES)


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


def test_a_planted_fault_becomes_a_file() -> None:
    text = exported_fault("amax_without_abs")
    assert unknown_names(text) == set()
    assert "harness" not in text


@pytest.mark.parametrize("name", ["row_scales_of_another_rank", "one_gradient_lost", "loss_over_local_tokens"])
def test_a_planted_fault_that_needs_the_harness_is_refused(name: str) -> None:
    with pytest.raises(HarnessError, match="cannot be exported: it needs harness"):
        exported_fault(name)


def test_every_planted_fault_is_a_file_or_refused() -> None:
    files = 0
    for name in all_faults():
        with contextlib.suppress(HarnessError):
            text = exported_fault(name)
            files += 1
            assert unknown_names(text) == set(), name
    assert files >= 98


def test_of_several_ranks_the_first_that_printed_its_outcome_is_reported() -> None:
    output = "rank 1: FAULT: y\nrank 0: fixed\nrank 2: FAULT: z\n"
    assert script_outcome(output) == ("FAULT", "rank 1: FAULT: y")
