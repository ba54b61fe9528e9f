"""How a kernel is judged: the bound on its error, its refusals, and what counts as equal. Without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.plugins.gpu.kernel_checks import KernelCheck, KernelObservation
from harness.plugins.gpu.kernels import allowed_of_sum, conclude, reason_of, refusal_checks, value_checks

LONG = KernelCheck(scaling="tensorwise", m=16, k=4096, n=16, out="float32")
SAME = KernelObservation(shape=(16, 16), dtype="float32", expected_shape=(16, 16), expected_dtype="float32")
# torch 2.13's words: of its CUDA kernel, and of the meta registration that the contract asks.
WORDS = [
    ("Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (32x40).", "alignment"),
    ("mat2 shape (48x24) must be divisible by 16", "alignment"),
    ("Expected self.size(1) to be divisible by 16, but got self.size(1)=40", "alignment"),
    ("Only multiplication of row-major and column-major matrices is supported by cuBLASLt", "layout"),
    ("mat2 must be col_major", "layout"),
    ("Multiplication of two Float8_e5m2 matrices is not supported", "operand dtypes"),
    ("Bias is not supported when out_dtype is set to Float32", "bias"),
    ("Bias must be BFloat16 to compute BFloat16 output, but got Half", "bias"),
    ("Only bf16 high precision output types are supported for row-wise scaling, got torch.float32", "output dtype"),
    ("Only bf16, fp16, and fp32 high precision output types are supported for row-wise scaling.", "output dtype"),
    ("Invalid scaling configuration.\n- For TensorWise scaling, a and b should be float8", "scales"),
    ("Both scale_a and scale_b must be float (fp32) tensors.", "scales"),
    ("scale_a must be swizzled to SWIZZLE_32_4_4 format", "swizzle"),
    ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED", "unknown"),
]


@pytest.mark.parametrize(("message", "reason"), WORDS)
def test_a_refusal_is_about_one_thing(message: str, reason: str) -> None:
    assert reason_of(message) == reason


@given(st.integers(1, 10**5), st.booleans())
def test_a_bound_grows_with_the_sum_and_fast_accumulation_is_never_sharper(k: int, fast: bool) -> None:
    def allowed(k: int, *, fast: bool) -> float:
        return allowed_of_sum(KernelCheck(scaling="tensorwise", m=16, k=k, n=16, fast=fast), "tensor_core")

    check = KernelCheck(scaling="tensorwise", m=16, k=k, n=16, fast=fast)
    assert 0 < allowed_of_sum(check, "float32") < allowed(k, fast=fast) <= allowed(k + 1, fast=fast)
    assert allowed(k, fast=False) <= allowed(k, fast=True)


def test_the_bounds_are_those_that_are_derived() -> None:
    assert allowed_of_sum(LONG, "float32") == pytest.approx((4096 + 3) * 2**-23)
    blocks = 4 * 33 * 2**-13
    assert allowed_of_sum(LONG, "tensor_core") == pytest.approx(blocks + (4096 + 3) * 2**-23)


def kinds(check: KernelCheck, seen: KernelObservation) -> list[str]:
    return [problem.kind for problem in conclude(check, seen, "float32").problems]


def test_values_are_judged_by_bits_or_by_the_bound() -> None:
    integers = KernelCheck(scaling="tensorwise", m=16, k=64, n=16, out="float32", values="integers")
    assert kinds(integers, SAME) == kinds(LONG, replace(SAME, unequal=9, error_of_sum=1e-6)) == []
    assert kinds(integers, replace(SAME, unequal=1)) == ["bits"]
    assert kinds(LONG, replace(SAME, unequal=1, error_of_sum=1e-3)) == ["error"]
    assert kinds(LONG, replace(SAME, error_of_sum=float("nan"))) == ["error"], "NaN never passes"
    assert kinds(LONG, replace(SAME, nonfinite=2)) == ["nonfinite"]
    assert kinds(LONG, replace(SAME, dtype="bfloat16")) == ["shape"]


def test_both_refuse_for_one_reason_or_neither_does() -> None:
    alignment, layout, unknown = WORDS[0][0], WORDS[3][0], WORDS[-1][0]
    assert kinds(LONG, KernelObservation(raised=alignment, refusal=WORDS[2][0])) == []
    assert kinds(LONG, KernelObservation(raised=layout, refusal=alignment)) == ["message"]
    assert kinds(LONG, KernelObservation(raised=unknown, refusal=unknown)) == ["message"]
    assert kinds(LONG, KernelObservation(raised=alignment)) == ["refused"]
    assert kinds(LONG, KernelObservation(refusal=alignment)) == ["ran"]


def test_the_lists_have_every_way_of_calling() -> None:
    checks = value_checks((10, 0))
    assert {*checks} - {*value_checks((9, 0))} == {check for check in checks if check.scaling == "blocks"}
    assert len({check.id for check in checks}) == len(checks)
    assert {check.scaling for check in checks if check.fast} == {"tensorwise", "rowwise"}
    assert {check.values for check in checks} == {"integers", "normal", "positive", "nan", "inf", "zero_scale"}
    assert any(check.m == 0 for check in checks) and any(check.bias for check in checks)
    older, newer = refusal_checks((9, 0)), refusal_checks((10, 0))
    assert {check.misfit for check in older} - {check.misfit for check in newer} == {"a_column_major", "b_row_major"}
    assert {check.misfit for check in newer} - {check.misfit for check in older} == {"not_swizzled", "scale_of_shard"}
