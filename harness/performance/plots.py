"""Curves around a case: speed-up over the size of its model, padding over its vocabulary, bytes over its world size."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from harness.expect.traffic import expected_transfers
from harness.matrix.case import Case
from harness.performance.casts import EAGER_KERNELS
from harness.performance.gains import added_bytes, padded_size, variants
from harness.performance.machine import Machine
from harness.performance.roofline import speed_up

_DIMS = (512, 1024, 2048, 4096, 8192, 16384)
_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_HEAD_DIM, _HEADS = 128, 8


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A named value for every place of its plot."""

    name: str
    values: tuple[float, ...]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over the same `places`, whose meaning is `across`; `logarithmic`: places are powers."""

    title: str
    across: str
    places: tuple[int, ...]
    lines: tuple[Line, ...]
    logarithmic: bool = False


def plots(case: Case, machine: Machine) -> tuple[Plot, ...]:
    """The curves around a case."""
    case = replace(case, train=replace(case.train, dtype="bfloat16"))
    return (_over_size(case, machine), _over_vocabulary(case), _over_world(case))


def _over_size(case: Case, machine: Machine) -> Plot:
    compiled = replace(case, compile="inductor")
    sized = [_of_dim(compiled, dim) for dim in _DIMS]
    return Plot(
        title="predicted speed over BF16, compiled blocks",
        across="dim of the model, with heads of 128 and ffn_dim of 4 dim",
        places=_DIMS,
        lines=tuple(
            Line(name=recipe, values=tuple(speed_up(variants(each)[recipe], machine) for each in sized))
            for recipe in EAGER_KERNELS
        ),
        logarithmic=True,
    )


def _of_dim(case: Case, dim: int) -> Case:
    heads = max(_HEADS, case.layout.tp, dim // _HEAD_DIM)
    model = replace(case.model, dim=dim, heads=heads, kv_heads=max(_HEADS, case.layout.tp), ffn_dim=4 * dim)
    return replace(case, model=model)


def _over_vocabulary(case: Case) -> Plot:
    tp, own, dim = case.layout.tp, case.model.vocab_size, case.model.shape.dim
    step = max(1, tp // 2) * 8
    first = max(step, own - 16 * step)
    places = tuple(sorted({own, *range(first - first % step, own + 16 * step, step)}))
    return Plot(
        title=f"MB that padding the vocabulary to a multiple of {16 * tp} adds to a rank",
        across="vocabulary",
        places=places,
        lines=(
            Line(name="MB", values=tuple(added_bytes(size, padded_size(size, tp), tp, dim) / 1e6 for size in places)),
        ),
    )


def _over_world(case: Case) -> Plot:
    sharded = [replace(case, layout=replace(case.layout, dp_shard=ranks)) for ranks in _RANKS]
    wide = replace(case.float8, fp8_all_gather=False, precompute_scale=False)
    narrow = replace(wide, recipe="tensorwise", casts=(), fp8_all_gather=True, precompute_scale=True)
    in_bf16, in_float8 = ([_received_gb(replace(each, float8=float8)) for each in sharded] for float8 in (wide, narrow))
    lines = {
        "weights gathered in BF16": [gathered for gathered, _ in in_bf16],
        "weights gathered in float8": [gathered for gathered, _ in in_float8],
        "gradients reduced in float32": [reduced for _, reduced in in_bf16],
    }
    return Plot(
        title="GB that FSDP brings to a rank in one step",
        across="world size",
        places=tuple(each.layout.world_size for each in sharded),
        lines=tuple(Line(name=name, values=tuple(values)) for name, values in lines.items()),
        logarithmic=True,
    )


def _received_gb(case: Case) -> tuple[float, float]:
    """GB that a rank receives in all-gathers, and in reduce-scatters."""
    others = case.layout.dp_shard - 1
    sent = {"all_gather": 0, "reduce_scatter": 0}
    for transfer in expected_transfers(case, step=2, rank=0):
        if transfer.axis == "dp_shard" and transfer.kind in sent:
            sent[transfer.kind] += transfer.payload_bytes
    return sent["all_gather"] * others / 1e9, sent["reduce_scatter"] * others / (others + 1) / 1e9
