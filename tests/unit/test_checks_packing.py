"""Packed documents beside each of them alone."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from harness.checks.packing import GRAD_NORM, LOSS, NOTHING_COMPARED, check_packing
from harness.checks.parity import FLOAT32_LOSS
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.trace import DocumentsAlone
from harness.verdict import Finding
from tests.builders import make_case, make_failure, make_run, make_tolerance, make_trace, make_witnesses, run_of

CASE = make_case(dp_shard=2, packing="padded", steps=2)
ALONE = 7.5


def findings(
    loss: float, *, alone: float | None = ALONE, norm: float | None = 1.0, case: Case = CASE, **given: object
) -> list[Finding]:
    of_documents = None if alone is None else DocumentsAlone(loss=alone, grad_norm=norm)
    trace = replace(make_trace(replace(case, layout=Case().layout), losses=[loss, 7.0]), documents_alone=of_documents)
    witnesses = {"solo": run_of(trace), "parity_tolerance": make_tolerance(0.0, 0.0), **given}
    return check_packing(case, make_run(case, losses=[loss, 6.0], sketches=()), make_witnesses(case, **witnesses))


def test_the_loss_of_step_1_is_that_of_documents_alone() -> None:
    assert findings(ALONE) == findings(ALONE + FLOAT32_LOSS / 2) == []
    (wrong,) = findings(ALONE + 2 * FLOAT32_LOSS)
    assert (wrong.rule, wrong.step, wrong.expected) == (LOSS.name, 1, repr(ALONE))
    assert wrong.fix is not None and "document" in wrong.fix


def test_nan_is_no_loss() -> None:
    assert [finding.rule for finding in findings(math.nan)] == [LOSS.name]
    assert [finding.rule for finding in findings(ALONE, alone=math.nan)] == [LOSS.name]


@pytest.mark.parametrize(("norm", "wrong"), [(1.0, False), (1.0002, False), (1.002, True), (math.nan, True)])
def test_the_gradient_norm_of_step_1_is_that_of_documents_alone_where_it_is_known(norm: float, wrong: bool) -> None:
    assert [finding.rule for finding in findings(ALONE, norm=norm)] == [GRAD_NORM.name] * wrong
    assert findings(ALONE, norm=None) == []


def test_a_factor_is_explained() -> None:
    (wrong,) = findings(ALONE / 2)
    assert any("1/2 of" in note for note in wrong.notes)


def test_without_a_loss_of_documents_nothing_passes() -> None:
    assert [finding.rule for finding in findings(ALONE, alone=None)] == [NOTHING_COMPARED.name]


def test_a_reference_that_did_not_finish_is_told_by_parity() -> None:
    assert findings(0.0, solo=run_of(make_failure())) == findings(0.0, parity_tolerance=None) == []


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ({}, "not packed"),
        ({"packing": "documents", "recipe": "tensorwise"}, "several tokens"),
        ({"packing": "documents", "recipe": "rowwise"}, ""),
        ({"packing": "padded", "recipe": "mxfp8", "dtype": "bfloat16"}, ""),
    ],
)
def test_it_says_why_it_does_not_judge(axes: dict[str, object], why: str) -> None:
    said = check_packing.not_judged(Expectations(make_case(**axes)), "cpu")
    assert why in said and bool(said) == bool(why)
