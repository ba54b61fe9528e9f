"""Published speeds with their sources, which predictions are compared with (`docs/plugins/predict.md`)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from harness.matrix.case import Case
from harness.matrix.models import MODELS, training
from harness.plugins.predict.machine import Machine, machine, peak

# Meta's H100: HBM2e with 2.4 TB/s, 500 W, and 400 Gb/s to other nodes.
GRAND_TETON = Machine(peak=replace(peak("h100"), memory_tb_s=2.4))

_BENCHMARKS = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
_DECEMBER = f"{_BENCHMARKS}/llama3_h100_202412_torchtitan.md"
_ASYNC_TP = f"{_BENCHMARKS}/asyncTP_llama3_h100_2025-06_torchtitan.md, table in pytorch/torchtitan#1299"
_TORCHAO = "https://docs.pytorch.org/ao/stable/workflows/training.html"
_FILTERED = "https://github.com/pytorch/torchtitan/pull/1319"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as fast as in BF16 a case was measured to train, and tokens a second and device where stated.

    `fitted`: rates of `machine.py` were chosen with this row.
    """

    name: str
    case: Case
    machine: Machine
    ratio: float
    bf16_tokens_s: float | None = None
    fitted: bool = False
    source: str


class PublishedLinear(msgspec.Struct, frozen=True, kw_only=True):
    """One linear alone on an H100, compiled: forward and both gradients of m tokens, with casts in float8 by row."""

    m: int
    k: int  # in_features
    n: int  # out_features
    bf16_ms: float
    float8_ms: float


# "tensorwise w/ rescale", fast accumulation: rows are scaled by a kernel behind the matmul.
# https://github.com/pytorch/ao/pull/2185
LINEARS = tuple(
    PublishedLinear(m=16384, k=k, n=n, bf16_ms=bf16, float8_ms=float8)
    for k, n, bf16, float8 in (
        (8192, 1280, 1.954, 1.757),
        (1024, 8192, 1.701, 1.193),
        (8192, 7168, 9.871, 5.707),
        (3584, 8192, 5.192, 3.034),
    )
)


def published() -> tuple[Published, ...]:
    """Every row, those that rates were fitted to first."""
    return tuple(sorted(_rows(), key=lambda row: not row.fitted))


def _rows() -> Iterator[Published]:
    yield from _one_node()
    yield from _tensor_parallel()
    yield from _async_tp()
    yield from _other_devices()
    yield _row(
        "debug size, eager, FSDP 8",
        _eager_debug(),
        bf16=450_700,
        float8=365_200,
        fitted=True,
        source="reported for torchtitan's debug model, of which pytorch/torchtitan#1191 has a log; its FP8 speed, "
        "ranks and compilation could not be looked up",
    )


def _one_node() -> Iterator[Published]:
    rowwise, tensorwise = _of_8b("rowwise"), _of_8b("tensorwise")
    log = "reported with 364.67 and 450.14 TFLOP/s, which fit; no page with it was found, configuration not stated"
    yield _row("8B, FSDP 8, tensorwise", tensorwise, bf16=6297, float8=7773, fitted=True, source=log)
    yield _row("8B, FSDP 8, tensorwise", tensorwise, bf16=6150, float8=7689.5, fitted=True, source=_TORCHAO)
    yield _row("8B, FSDP 8, rowwise", rowwise, bf16=6150, float8=6768, fitted=True, source=_TORCHAO)
    commit = "https://github.com/pytorch/torchtitan/commit/7a04053a742af65bc76826bbcc57b7bede7be62c"
    yield _row("8B, FSDP 8, tensorwise, January 2025", tensorwise, bf16=5760, float8=7186, source=commit)
    yield _row("8B, FSDP 8, rowwise, January 2025", rowwise, bf16=5760, float8=6412, source=commit)
    for ranks, bf16, float8 in ((8, 6667, 8532), (128, 6514, 8380)):
        case = _of_8b("tensorwise", tokens=2 * 8192, dp_shard=ranks)
        yield _row(f"8B, FSDP {ranks}, batch 2", case, bf16=bf16, float8=float8, fitted=True, source=_DECEMBER)
    options = {"seq_len": 4096, "checkpointing": "none", "fp8_all_gather": False, "precompute_scale": False}
    alone = _of_8b("tensorwise", tokens=4096, **options)
    source = "https://github.com/pytorch/torchtitan/pull/778; 4 or 8 H100"
    yield _row("8B, FSDP 8, 4096 tokens, no checkpointing", alone, bf16=5033.8, float8=5768.6, source=source)
    case = _of_70b("tensorwise", tokens=8192, tp=1, dp_shard=128, fp8_all_gather=True, precompute_scale=True)
    discussed = "https://dev-discuss.pytorch.org/t/enabling-float8-all-gather-in-fsdp2/2359; batch not stated"
    yield Published(name="70B, FSDP 128", case=case, machine=GRAND_TETON, ratio=1.5, source=discussed)


def _tensor_parallel() -> Iterator[Published]:
    for recipe, float8 in (("tensorwise", 809.8), ("rowwise", 599.6)):
        name = f"70B, FSDP 32 x TP 8, {recipe}"
        yield _row(name, _of_70b(recipe), bf16=597.3, float8=float8, fitted=True, source=_ASYNC_TP)
    for recipe, float8 in (("tensorwise", 5078.1), ("rowwise", 3708.5)):
        name = f"8B, FSDP 8 x TP 8, {recipe}"
        yield _row(name, _of_8b_tp(recipe), bf16=4378, float8=float8, fitted=True, source=_ASYNC_TP)
    case = _of_8b_tp("rowwise", tp=2, dp_shard=2, tokens=8192)
    source = "https://github.com/pytorch/torchtitan/issues/1207"
    yield _row("8B, FSDP 2 x TP 2, rowwise", case, bf16=5378, float8=5189, source=source)
    kept = _of_70b("rowwise", filter_fqns=("attention.wk", "attention.wv"))
    name = "70B, FSDP 32 x TP 8, rowwise, wk and wv in BF16"
    yield Published(name=name, case=kept, machine=GRAND_TETON, ratio=1.10, source=f"{_FILTERED}: about 10 %")


def _async_tp() -> Iterator[Published]:
    for recipe, float8 in (("tensorwise", 942.4), ("rowwise", 624.8)):
        name = f"70B, FSDP 32 x TP 8, async TP, {recipe}"
        yield _row(name, _of_70b(recipe, async_tp=True), bf16=652.4, float8=float8, source=_ASYNC_TP)
    for recipe, float8 in (("tensorwise", 5570.1), ("rowwise", 3914.9)):
        name = f"8B, FSDP 8 x TP 8, async TP, {recipe}"
        yield _row(name, _of_8b_tp(recipe, async_tp=True), bf16=4809.4, float8=float8, source=_ASYNC_TP)


def _other_devices() -> Iterator[Published]:
    for device, bf16, speeds in (
        ("b200", 8307.5, {"tensorwise": 10417.0, "rowwise": 8640.5, "mxfp8": 9642.0, "mxfp8_floor": 9969.0}),
        ("mi300x", 5376.5, {"tensorwise": 6166.0, "rowwise_with_gw_hp": 6100.0, "rowwise": 5891.0}),
    ):
        for recipe, float8 in speeds.items():
            name = f"8B, FSDP 8, {recipe}, {device}"
            yield _row(name, _of_8b(recipe), on=machine(device), bf16=bf16, float8=float8, source=_TORCHAO)


def _row(
    name: str,
    case: Case,
    *,
    bf16: float,
    float8: float,
    source: str,
    fitted: bool = False,
    on: Machine = GRAND_TETON,
) -> Published:
    ratio = float8 / bf16
    return Published(name=name, case=case, machine=on, ratio=ratio, bf16_tokens_s=bf16, fitted=fitted, source=source)


def _of_8b(recipe: str, *, tokens: int = 8192, **axes: object) -> Case:
    """Compiled blocks, FSDP2, selective checkpointing by operator; tensorwise with float8 all-gather."""
    gathers = recipe == "tensorwise"
    given = {"dp_shard": 8, "checkpointing": "selective_op", "compile": "inductor", "recipe": recipe}
    gathering = {"fp8_all_gather": gathers, "precompute_scale": gathers}
    return _training("llama3-8b", tokens, {**given, **gathering, **axes})


def _of_8b_tp(recipe: str, *, tp: int = 8, dp_shard: int = 8, tokens: int = 12 * 8192, **axes: object) -> Case:
    return _of_8b(recipe, tokens=tokens, **{"tp": tp, "dp_shard": dp_shard, **_tp_options(recipe), **axes})


def _of_70b(recipe: str, *, tp: int = 8, dp_shard: int = 32, tokens: int = 16 * 8192, **axes: object) -> Case:
    """Compiled blocks, batch 16, full checkpointing."""
    given = {"tp": tp, "dp_shard": dp_shard, "checkpointing": "full", "compile": "inductor", "recipe": recipe}
    styles = _tp_options(recipe) if tp > 1 else {}
    return _training("llama3-70b", tokens, {**given, **styles, **axes})


def _training(model: str, tokens: int, axes: dict[str, object]) -> Case:
    return training(MODELS[model], tokens=tokens, **axes)


def _tp_options(recipe: str) -> dict[str, object]:
    """torchtitan's TP styles: float8 ones for tensorwise. These runs gather weights in BF16."""
    styles = "float8" if recipe == "tensorwise" else "plain"
    return {"tp_styles": styles, "fp8_all_gather": False, "precompute_scale": False}


def _eager_debug() -> Case:
    model = MODELS["debugmodel"]
    return training(model, recipe="tensorwise", vocab_size=2256, dp_shard=8, tokens=8 * 2048)
