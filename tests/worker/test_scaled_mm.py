"""The virtual `_scaled_mm`: the arithmetic of the stock kernel, the refusals of a GPU, in every role of a linear."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from harness.checks.check import Witnesses
from harness.checks.fp8_on import FOREIGN_PARTS, check_fp8_on
from harness.engine.fork_server_engine import ForkServerEngine
from harness.expect.expectations import Expectations
from harness.matrix.caseid import parse_case_id
from harness.plugins.gpu.levels import ask_torch
from harness.request import RunRequest
from harness.trace import RankTrace
from harness.verdict import Finding
from harness.worker.dispatch_hooks.matmuls import ScaledMMCounter
from harness.worker.virtual import device
from harness.worker.virtual.scaled_mm import scaled_mm
from harness.worker.virtual.scaled_rules import GPU
from tests.builders import run_of
from tests.jobs import run_request, traces_of
from tests.worker.conftest import Train

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.tensor(1.0)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    device.install()


def operands(m: int, k: int, n: int, *, a_dtype=E4M3, b_dtype=E4M3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    a = (torch.randn(m, k, generator=generator) * 30).to(a_dtype)
    b = (torch.randn(n, k, generator=generator) * 30).to(b_dtype).t()
    return a, b


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_tensorwise_equals_dequantized_float64(out_dtype, a_dtype, b_dtype):
    a, b = operands(32, 48, 16, a_dtype=a_dtype, b_dtype=b_dtype)
    scale_a, scale_b = torch.tensor(0.125), torch.tensor(0.03)
    exact = (a.double() @ b.double()) * (scale_a.double() * scale_b.double())
    result = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
    assert result.dtype == out_dtype
    assert torch.equal(result, exact.to(out_dtype))


def test_rowwise_applies_the_scale_of_every_row_and_column():
    a, b = operands(32, 48, 16)
    scale_a, scale_b = torch.rand(32, 1) + 0.5, torch.rand(1, 16) + 0.5
    exact = a.double() @ b.double() * scale_a.double() * scale_b.double()
    result = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    assert torch.allclose(result.double(), exact, rtol=2**-8, atol=0)
    assert not torch.allclose(result.double(), a.double() @ b.double() * scale_a[0].double(), rtol=0.05, atol=0)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 15))
def test_a_shard_of_the_free_dims_has_the_same_bits(seed, cut):
    a, b = operands(32, 64, 256, seed=seed)
    whole = scaled_mm(a, b, ONE, ONE, out_dtype=torch.float32)
    columns = scaled_mm(a, b[:, 16 * cut :], ONE, ONE, out_dtype=torch.float32)
    rows = scaled_mm(a[cut:], b, ONE, ONE, out_dtype=torch.float32)
    assert torch.equal(whole[:, 16 * cut :], columns)
    assert torch.equal(whole[cut:], rows)


def test_the_thread_count_and_the_order_of_summation_do_not_matter():
    a, b = operands(64, 512, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = scaled_mm(a, b, ONE, ONE, out_dtype=torch.float32)
        torch.set_num_threads(2)
        double = scaled_mm(a, b, ONE, ONE, out_dtype=torch.float32)
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(512)
    shuffled = scaled_mm(a[:, order].contiguous(), b[order].t().contiguous().t(), ONE, ONE, out_dtype=torch.float32)
    assert torch.equal(single, double)
    assert torch.equal(single, shuffled)


def refusal(a, b, scale_a=ONE, scale_b=ONE, out_dtype=torch.bfloat16, bias=None) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, bias=bias)
    return str(caught.value)


def test_what_a_gpu_refuses_is_refused_with_its_words():
    a, b = operands(32, 48, 32)
    assert refusal(*operands(32, 40, 32)) == (
        "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (32x40)."
    )
    assert refusal(*operands(32, 48, 24)) == "mat2 shape (48x24) must be divisible by 16"
    layout = "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"
    assert refusal(a, b.contiguous()) == refusal(a.t().contiguous().t(), b) == layout
    for scales in (
        (ONE.double(), ONE.double()),
        (torch.rand(16, 1), torch.rand(1, 32)),
        (torch.rand(32, 2)[:, :1], torch.rand(1, 32)),
    ):
        assert refusal(a, b, *scales).startswith("Invalid scaling configuration.\n- For TensorWise scaling, a and b")
    assert refusal(a.to(E5M2), b.to(E5M2)) == "Multiplication of two Float8_e5m2 matrices is not supported"
    assert "Float32" in refusal(a, b, out_dtype=torch.float32, bias=torch.ones(32))
    half = torch.ones(32, dtype=torch.float16)
    assert refusal(a, b, bias=half) == "Bias must be BFloat16 to compute BFloat16 output, but got Half"
    assert refusal(a, b, bias=half[:16]) == "Bias must be size 32 but got 16"


ROWS = torch.rand(32, 1) + 0.5, torch.rand(1, 32) + 0.5


def test_what_is_refused_is_that_of_the_pretended_gpu(monkeypatch: pytest.MonkeyPatch):
    a, b = operands(32, 48, 32)
    *blocked, _ = in_blocks(32, 64, 32)
    slices = torch.rand(1, 32).t(), torch.rand(1, 32)
    for out_dtype in (torch.float32, torch.float16):
        assert torch._scaled_mm(a, b, *ROWS, out_dtype=out_dtype).dtype == out_dtype
    monkeypatch.setattr(GPU, "capability", (8, 0))
    assert "compute capability >= 9.0 or 8.9" in refusal(a, b)
    monkeypatch.setattr(GPU, "capability", (9, 0))
    assert refusal(*blocked) == "scales of 1x32 values: cuBLAS has no kernel for SM 9.0"
    monkeypatch.setattr(GPU, "capability", (10, 0))
    assert torch._scaled_mm(a, b.contiguous(), ONE, ONE, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert "Only bf16, fp16, and fp32" in refusal(a, b, *ROWS, out_dtype=None)
    with pytest.raises(NotImplementedError, match=r"only supported in CUDA for SM90"):
        v2(a, b, *slices, ScalingType.BlockWise1x128)


def test_without_a_dtype_the_result_is_float8_and_saturates():
    a, b = operands(32, 48, 32)
    exact = (a.double() @ b.double()) * 0.125
    for scale_result, by in ((None, 1.0), (torch.tensor(0.5), 0.5)):
        out = torch._scaled_mm(a, b, ONE * 0.125, ONE, scale_result=scale_result)
        assert out.dtype == E4M3 and torch.equal(out.double(), (exact * by).clamp(-448, 448).to(E4M3).double())
    assert "the virtual device has it for scales of tensors" in refusal(a, b, out_dtype=E5M2)


@pytest.mark.parametrize("kinds", [((1, 128), (1, 128)), ((1, 128), (128, 128)), ((128, 128), (1, 128))])
@pytest.mark.parametrize("sizes", [(160, 272, 288), (32, 128, 16)])
def test_blocks_of_128_are_multiplied_by_their_scales(sizes, kinds):
    m, k, n = sizes
    (rows_a, _), (rows_b, _) = kinds
    blocks = -(-k // 128)
    a, b = operands(m, k, n)
    of_a, of_b = (torch.rand(-(-size // rows), blocks) + 0.5 for size, rows in ((m, rows_a), (n, rows_b)))
    whole = [
        data.double() * scale.double().repeat_interleave(rows, 0)[: len(data)].repeat_interleave(128, 1)[:, :k]
        for data, scale, rows in ((a, of_a, rows_a), (b.t(), of_b, rows_b))
    ]
    exact = (whole[0] @ whole[1].t()).float()
    first = [scale.t().contiguous().t() if rows == 1 else scale for scale, rows in ((of_a, rows_a), (of_b, rows_b))]
    result = torch._scaled_mm(a, b, first[0], first[1].t(), out_dtype=torch.float32)
    assert torch.allclose(result, exact, rtol=1e-6, atol=1e-3)
    padded = [
        scale if rows == 1 else functional.pad(scale, (0, -blocks % 4)).t()
        for scale, rows in zip(first, (rows_a, rows_b), strict=True)
    ]
    names = [ScalingType.BlockWise1x128 if rows == 1 else ScalingType.BlockWise128x128 for rows in (rows_a, rows_b)]
    second = functional.scaled_mm(a, b, padded[0], names[0], padded[1], names[1], output_dtype=torch.float32)
    assert torch.equal(second, result)


@pytest.mark.parametrize(
    ("tokens", "k", "n", "gemm"),
    [
        (32, 32, 32, None),
        (32, 32, 1128, "forward"),
        (33, 32, 32, "wgrad"),
        (8, 32, 32, "wgrad"),
        (32, 40, 32, "forward"),
    ],
)
def test_forward_dgrad_and_wgrad_are_all_checked(tokens, k, n, gemm):
    """Tokens that are no multiple of 16 pass forward and dgrad: a check of the forward alone is blind to them."""
    model = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    x = torch.randn(tokens, k, requires_grad=True)
    seen = None
    try:
        out = model(x)
        seen = "wgrad"
        out.sum().backward()
        seen = None
    except RuntimeError as error:
        assert "divisible by 16" in str(error)
        seen = seen or "forward"
    assert seen == gemm


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_every_scaled_matmul_of_a_linear_is_counted(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 32, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    with ScaledMMCounter() as counted:
        model(torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert counted.calls == (4 if recipe == "rowwise_with_gw_hp" else 6)


def test_the_out_variant_writes_what_the_other_returns():
    a, b = operands(32, 48, 16)
    out = torch.empty(32, 16, dtype=torch.bfloat16)
    torch._scaled_mm(a, b, scale_a=ONE, scale_b=ONE, out_dtype=torch.bfloat16, out=out)
    assert torch.equal(out, torch._scaled_mm(a, b, scale_a=ONE, scale_b=ONE, out_dtype=torch.bfloat16))


def in_blocks(m: int, k: int, n: int, *, seed: int = 0):
    """Operands of integers with scales of blocks that differ, and the exact product."""
    from torchao.prototype.mx_formats.utils import to_blocked  # behind the virtual device, which imports it first

    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-4, 5, (rows, k), generator=draw).to(E4M3) for rows in (m, n))
    exponents = [torch.randint(124, 131, (rows, k // 32), generator=draw, dtype=torch.uint8) for rows in (m, n)]
    whole = [
        data.double() * exponent.view(torch.float8_e8m0fnu).double().repeat_interleave(32, dim=1)
        for data, exponent in zip((a, b), exponents, strict=True)
    ]
    scales = [to_blocked(exponent).view(torch.float8_e8m0fnu) for exponent in exponents]
    return a, b.t(), *scales, whole[0] @ whole[1].t()


@pytest.mark.parametrize("sizes", [(32, 32, 32), (160, 96, 288), (7, 64, 32)])
def test_every_block_has_its_own_scale(sizes):
    a, b, scale_a, scale_b, exact = in_blocks(*sizes)
    result = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)
    assert torch.equal(result, exact.bfloat16())
    assert not torch.equal(exact.bfloat16(), (a.double() @ b.double()).bfloat16())


def v2(a, b, scale_a, scale_b, kind, swizzle=SwizzleType.SWIZZLE_32_4_4, **options):
    return torch.nn.functional.scaled_mm(
        a, b, scale_a, kind, scale_b, kind, swizzle_a=swizzle, swizzle_b=swizzle, **options
    )


def test_the_second_version_is_the_first_one_and_is_counted():
    a, b = operands(32, 64, 16)
    rows = torch.rand(32, 1) + 0.5, torch.rand(1, 16) + 0.5
    in_order = {"swizzle": SwizzleType.NO_SWIZZLE}
    *blocked, _ = in_blocks(160, 96, 288)
    with ScaledMMCounter() as counted:
        pairs = (
            (
                v2(a, b, ONE, ONE, ScalingType.TensorWise, **in_order),
                scaled_mm(a, b, ONE, ONE, out_dtype=torch.bfloat16),
            ),
            (v2(a, b, *rows, ScalingType.RowWise, **in_order), scaled_mm(a, b, *rows, out_dtype=torch.bfloat16)),
            (v2(*blocked, ScalingType.BlockWise1x32), scaled_mm(*blocked, out_dtype=torch.bfloat16)),
        )
        kinds = ([ScalingType.BlockWise1x32.value], [SwizzleType.SWIZZLE_32_4_4.value])
        out = torch.empty(0, dtype=torch.bfloat16)
        given = (*blocked[:2], blocked[2:3], *kinds, blocked[3:], *kinds, None, None)
        torch.ops.aten._scaled_mm_v2.out(*given, out=out)
    assert counted.calls == 4
    assert all(torch.equal(product, exact) for product, exact in (*pairs, (out, pairs[2][1])))


def test_the_second_version_refuses_as_a_gpu_does():
    a, b, scale_a, scale_b, _ = in_blocks(32, 64, 32)
    with pytest.raises(ValueError, match="scale_a must be swizzled to SWIZZLE_32_4_4 format"):
        v2(a, b, scale_a, scale_b, ScalingType.BlockWise1x32, swizzle=SwizzleType.NO_SWIZZLE)
    with pytest.raises((RuntimeError, ValueError), match="scale_b must have 512"):
        v2(a, b, scale_a, scale_b[:256], ScalingType.BlockWise1x32)
    with pytest.raises(NotImplementedError, match="the virtual device has float8 scaling only"):
        v2(a, b, scale_a, scale_b, ScalingType.BlockWise1x16)


CASE = parse_case_id("single-rowwise-layers.1-v2048-gb1-sl16-s1-b16")  # small: torch's kernel of a CPU is slow


@pytest.fixture(scope="module")
def by_kernel(tmp_path_factory: pytest.TempPathFactory) -> RankTrace:
    """The case on ranks whose fork server left torch's kernel where it is."""
    options = {"device": "cpu", "arithmetic": "kernel"}
    with ForkServerEngine("harness.worker.main", options) as engine:
        request = RunRequest(case=CASE, arithmetic="kernel")
        (trace,) = traces_of(run_request(engine, tmp_path_factory.mktemp("job"), request))
    return trace


def findings(trace: RankTrace) -> list[Finding]:
    return check_fp8_on(CASE, run_of(trace), Witnesses(expect=Expectations(CASE)))


def test_the_kernel_of_the_device_trains_and_is_not_the_exact_one(by_kernel: RankTrace, train: Train) -> None:
    (exact,) = train(CASE)
    assert (by_kernel.arithmetic, exact.arithmetic) == ("kernel", "exact")
    assert "scaled_mm" in exact.virtual and "scaled_mm" not in by_kernel.virtual
    assert findings(by_kernel) == findings(exact) == []
    for mine, other in zip(by_kernel.steps, exact.steps, strict=True):
        assert mine.scaled_mm_calls == other.scaled_mm_calls > 0
        assert mine.loss == pytest.approx(other.loss, abs=1e-3)


def test_an_exact_matmul_that_was_not_asked_for_is_found(train: Train) -> None:
    (trace,) = train(CASE, arithmetic="kernel")  # from a fork server that has the exact one
    (finding,) = findings(trace)
    assert (finding.rule, finding.values["device"], finding.ranks) == (FOREIGN_PARTS.name, "cpu", (0,))


def test_torch_is_asked_about_devices_in_a_process_that_ends() -> None:
    facts = ask_torch()
    assert facts.torch == torch.__version__ and facts.cuda == (torch.version.cuda or "")
    assert len(facts.devices) == (torch.cuda.device_count() if facts.cuda else 0)


def test_cuda_gets_the_exact_matmul_and_nothing_else_where_it_is_asked_for() -> None:
    before = set(device.install("nccl", device="cuda", arithmetic="kernel"))
    assert set(device.install("nccl", device="cuda", arithmetic="exact")) == before | {"scaled_mm"}
    for name in ("aten::_scaled_mm", "aten::_scaled_mm.out"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
