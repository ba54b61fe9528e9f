"""The matmuls of a rank agree with what rules and checks know of them, for any case that trains."""

from __future__ import annotations

from hypothesis import given

from harness.expect.fusion import executed_scaled_mm_calls
from harness.matrix import linears
from harness.matrix.case import Case
from harness.matrix.linears import is_misaligned
from harness.matrix.spellings import spellings
from harness.matrix.targets import is_llama
from harness.performance.flops import executed
from harness.performance.gemms import FLOAT8, gemms
from harness.performance.models import MODELS, training
from tests.strategies import TRAINED_CASES


@given(TRAINED_CASES)
def test_matmuls_in_float8_are_those_that_rules_know(case: Case) -> None:
    """Of all ranks, every shape once."""
    found = {
        (gemm.fqn, gemm.role, gemm.m, gemm.n, gemm.k)
        for rank in range(case.layout.tp)
        for gemm in gemms(case, rank=rank)
        if gemm.precision == FLOAT8
    }
    assert found == {(gemm.fqn, gemm.role, gemm.m, gemm.n, gemm.k) for gemm in linears.gemms(case)}


@given(TRAINED_CASES)
def test_calls_in_float8_are_those_that_checks_expect(case: Case) -> None:
    if not is_llama(case.target):
        return
    found = executed(case, rank=0).get("matmuls in float8")
    assert (0 if found is None else found.calls) == executed_scaled_mm_calls(case)


@given(TRAINED_CASES)
def test_torch_takes_what_is_aligned_and_what_is_padded(case: Case) -> None:
    for gemm in gemms(case):
        if gemm.precision == FLOAT8:
            assert not is_misaligned(case, gemm)
            assert gemm.n % 16 == gemm.executed_k % 16 == 0 and 0 <= gemm.executed_k - gemm.k < 16
        else:
            assert gemm.executed_k == gemm.k


def test_named_models_have_the_sizes_that_reports_mean() -> None:
    known = {model.text: model.axes for model in spellings().model}
    for name, text in (
        ("debugmodel", "torchtitan's debugmodel since 2025-06"),
        ("llama3-8b", "Llama 3 8B"),
        ("llama3-70b", "Llama 3 70B"),
        ("llama3-405b", "Llama 3 405B"),
    ):
        model = training(MODELS[name]).model
        sizes = {axis: getattr(model.shape, axis, model.vocab_size) for axis in known[text]}
        assert sizes == known[text]
