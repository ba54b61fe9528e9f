"""Planted faults, one for each mechanism of public reports: each is found, and its headline names what was done."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from fp8_harness import assert_handoff
from harness.plugins.handoff.agreement import agreement, converted_in, read_list
from harness.plugins.handoff.tensors import State
from harness.plugins.handoff.worker.states import state_of, states
from harness.worker.virtual import casts
from tests.plugins.handoff.trainers import exported, quantized, weights

Tensors = dict[str, Any]
GATE, UP, Q, OUT = (
    f"model.layers.0.{name}_proj.weight" for name in ("mlp.gate", "mlp.up", "self_attn.q", "self_attn.o")
)
EXPERTS = "model.layers.0.mlp.experts"


def ue8m0(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def rounded_after_the_cast(made: Tensors) -> None:
    made |= {name: ue8m0(scale) for name, scale in made.items() if name.endswith("_scale")}


def mantissa_dropped(made: Tensors) -> None:
    made |= {
        name: torch.exp2(torch.floor(torch.log2(scale))) for name, scale in made.items() if name.endswith("_scale")
    }


def reciprocal(made: Tensors) -> None:
    made |= {name: 1 / scale for name, scale in made.items() if name.endswith("_scale")}


def of_the_neighbor(made: Tensors) -> None:
    made[f"{GATE}_scale"] = made[f"{GATE}_scale"].roll(1, 0)


def swizzle_kept(made: Tensors) -> None:
    casts.install()  # before torchao's MXFP8 is imported
    from torchao.prototype.mx_formats.utils import to_blocked

    scale = made["wide_scale"]
    made["wide_scale"] = to_blocked(scale.view(torch.uint8)).view(scale.dtype).reshape(scale.shape)


def tail_not_scaled(made: Tensors) -> None:
    made[OUT][:, 128:] = (weights()[OUT][:, 128:]).to(torch.float8_e4m3fn)


def no_scales(made: Tensors) -> None:
    del made[f"{Q}_scale"]


def zero_block(made: Tensors) -> None:
    zero = weights()[OUT]
    zero[:128, :128] = 0
    scale = made[f"{OUT}_scale"]
    scale[0, 0] = 0
    made[OUT][:128, :128] = (zero[:128, :128] / scale[0, 0]).to(torch.float8_e4m3fn)


def padding_not_written(made: Tensors) -> None:
    data = torch.full((256, 256), 7.0).to(torch.float8_e4m3fn)
    data[: made[OUT].shape[0], : made[OUT].shape[1]] = made[OUT]
    made[OUT] = data


def experts_by_local_number(made: Tensors) -> None:
    for suffix in ("", "_scale"):
        names = [f"{EXPERTS}.{at}.gate_up_proj.weight{suffix}" for at in range(4)]
        made |= dict(zip(names, [made[names[at]] for at in (2, 3, 0, 1)], strict=True))


def gate_and_up_interleaved(made: Tensors) -> None:
    stack = weights()[f"{EXPERTS}.gate_up_proj"]
    for at in range(4):
        half = stack.shape[1] // 2
        mixed = torch.stack([stack[at, :half], stack[at, half:]], dim=1).flatten(0, 1)
        name = f"{EXPERTS}.{at}.gate_up_proj.weight"
        made[name], made[f"{name}_scale"] = quantized(mixed, "fp8_row")


def chunk_overwritten(made: Tensors) -> None:
    buffer = torch.empty_like(made[GATE])
    for name in (GATE, UP):
        made[name] = buffer.copy_(made[name])


def experts_skipped(made: Tensors) -> None:
    for name in [name for name in made if "experts" in name]:
        del made[name]


def experts_at_their_first_values(made: Tensors) -> None:
    for name in [name for name in made if "experts" in name and not name.endswith("_scale")]:
        made[name], made[f"{name}_scale"] = quantized(torch.randn(132, 160) * 0.02, "fp8_row")


def rotary_of_another_convention(made: Tensors) -> None:
    heads = weights()[Q].unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
    made[Q], made[f"{Q}_scale"] = quantized(heads, "fp8_row")


def transposed(made: Tensors) -> None:
    made[f"{OUT}_scale"] = made[f"{OUT}_scale"].T.contiguous()


def stale_amax(made: Tensors) -> None:
    scale = made[f"{Q}_scale"] * 4
    made[Q], made[f"{Q}_scale"] = (weights()[Q] / scale).to(torch.float8_e4m3fn), scale


class Fault(NamedTuple):
    plant: Callable[[Tensors], None]
    format: str
    report: str  # the mechanism was told there
    rule: str
    where: str
    words: str


AFTER, HALF = (
    "they were rounded to powers of two after the cast",
    "more than half a quantum off, and it is nothing like the source",
)
FAULTS = [
    Fault(rounded_after_the_cast, "fp8_block128_ue8m0", "transformers#46763", "scale", "23 modules", AFTER),
    Fault(rounded_after_the_cast, "fp8_row", "prime-rl#3112", "scale", "23 modules", AFTER),
    Fault(mantissa_dropped, "fp8_block128", "sglang#39193", "scale", "23 modules", AFTER),
    Fault(
        lambda made: None,
        "fp8_block128_ue8m0",
        "miles#1584",
        "power-of-two",
        "23 modules",
        "4 scales are no power of two",
    ),
    Fault(reciprocal, "fp8_row", "mcore-bridge#183", "scale", "23 modules", "they are the reciprocals of those"),
    Fault(of_the_neighbor, "fp8_row", "vllm#54683", "scale", GATE, "they belong to other blocks"),
    Fault(swizzle_kept, "mxfp8", "verl#7519", "scale", "wide", "they are in the swizzled layout of kernels"),
    Fault(transposed, "fp8_block128", "slime#1624", "scale", OUT, "they are transposed"),
    Fault(tail_not_scaled, "fp8_block128", "FBGEMM#6159", "scale", OUT, "others than those that it was quantized with"),
    Fault(stale_amax, "fp8_row", "TE#2974", "too-large-scale", Q, "scales are larger than its values need"),
    Fault(no_scales, "fp8_row", "Model-Connect#1115", "no-scale", Q, "it is float8_e4m3fn and has no scale"),
    Fault(zero_block, "fp8_block128", "slime#2256", "number", OUT, "16384 values are not finite, an all-zero block"),
    Fault(
        padding_not_written,
        "fp8_block128",
        "ao#4186",
        "padding",
        OUT,
        "values are not zero behind the end of the source",
    ),
    Fault(
        experts_by_local_number,
        "fp8_row",
        "verl#7986",
        "order",
        f"{EXPERTS}.0",
        f"the weights of {EXPERTS}.gate_up_proj[2]",
    ),
    Fault(
        gate_and_up_interleaved,
        "fp8_row",
        "miles#1623",
        "order",
        "4 modules",
        "with both halves interleaved, as gate and up",
    ),
    Fault(
        rotary_of_another_convention,
        "fp8_row",
        "miles#1338",
        "order",
        Q,
        "convention of rotary embeddings, heads of 64",
    ),
    Fault(chunk_overwritten, "fp8_tensor", "SkyRL#1737", "aliased", UP, f"it is in the memory of {GATE}"),
    Fault(experts_skipped, "fp8_row", "ATOM#2028", "missing", "8 modules", "each is not exported"),
    Fault(experts_at_their_first_values, "fp8_row", "Automodel#2682", "values", "8 modules", HALF),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.report}-{fault.plant.__name__}")
def test_a_planted_fault_is_found_with_its_headline(fault: Fault) -> None:
    source = weights()
    spread = torch.logspace(-3, 3, 128)[:, None]
    source["wide"] = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)) * spread
    if fault.plant is zero_block:
        source[OUT][:128, :128] = 0
    stored = "fp8_block128" if fault.report in ("transformers#46763", "miles#1584") else fault.format
    made = exported(source, stored)
    if stored == fault.format:
        assert_handoff(source, made, format=fault.format)
    fault.plant(made)
    with pytest.raises(AssertionError) as raised:
        assert_handoff(source, made, format=fault.format)
    what, why, *_ = str(raised.value).splitlines()
    assert what.startswith(f"handoff/{fault.rule} in {fault.where}") and fault.words in what, what
    assert why.startswith(("expected ", "found ")), why


# Faults that two hand-offs show


def state() -> dict[str, torch.Tensor]:
    return {name: each for name, each in weights().items() if "layers.0.self_attn" in name or "norm" in name}


def export(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return exported(tensors, "fp8_row")


def export_from_cache() -> Callable[[Mapping[str, torch.Tensor]], Tensors]:
    """Return an exporter that quantizes one weight once, whatever happens to it later."""
    kept: Tensors = {}

    def exporter(tensors: Mapping[str, torch.Tensor]) -> Tensors:
        made = export(tensors)
        kept.update({name: each for name, each in made.items() if Q in name and name not in kept})
        return made | kept

    return exporter


def export_views(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Export what has one dimension as it is."""
    return export(tensors) | {name: each for name, each in tensors.items() if each.ndim < 2}


def export_anew() -> Callable[[Mapping[str, torch.Tensor]], Tensors]:
    """Return an exporter that writes a weight with another scale each time."""
    times: list[int] = []

    def exporter(tensors: Mapping[str, torch.Tensor]) -> Tensors:
        made, scale = export(tensors), 1 + 0.1 * len(times)
        times.append(1)
        made[f"{OUT}_scale"] = made[f"{OUT}_scale"] * scale
        made[OUT] = (tensors[OUT] / made[f"{OUT}_scale"]).to(torch.float8_e4m3fn)
        return made

    return exporter


def update(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, each in tensors.items():
        if "o_proj" not in name:
            each.mul_(1.5)


NO_COPY = r"handoff/aliased in .*layernorm.*: each changed when the source was updated: it is no copy"


@pytest.mark.parametrize(
    ("exporter", "headline"),
    [
        (export, ""),
        (export_from_cache(), rf"handoff/stale in {Q}: it is still the one of the first hand-off"),  # SkyRL#1345
        (export_views, NO_COPY),
        (export_anew(), rf"handoff/moved in {OUT}: it changed, although its source did not"),
    ],
)
def test_a_second_hand_off_differs_where_it_must_and_nowhere_else(exporter: Any, headline: str) -> None:
    made = states(state, exporter, update)
    also = {"after": (made["updated"], made["after"]), "kept": made["kept"]}
    if not headline:
        assert_handoff(made["source"], made["exported"], format="fp8_row", **also)
        return
    with pytest.raises(AssertionError) as raised:
        assert_handoff(made["source"], made["exported"], format="fp8_row", **also)
    assert re.match(headline, str(raised.value)), raised.value


def scale_of_the_local_shard(rank: int) -> Tensors:
    """Return what a rank exports that quantizes its rows by their own amax, with one scale for a weight."""
    rows = weights()[Q][rank * 96 : rank * 96 + 96]
    data, scale = quantized(rows, "fp8_tensor")
    return {Q: {"local": data, "offsets": (rank * 96, 0), "shape": (192, 160)}, f"{Q}_scale": scale}


def test_ranks_that_disagree_and_shards_that_lack_are_found() -> None:
    source = {Q: weights()[Q]}
    with pytest.raises(AssertionError, match=rf"handoff/replicas in {Q}_scale: ranks 0-1 hold other values"):
        assert_handoff(source, [scale_of_the_local_shard(rank) for rank in range(2)], format="fp8_tensor")
    half, whole = scale_of_the_local_shard(0), quantized(source[Q], "fp8_tensor")
    with pytest.raises(AssertionError, match=r"handoff/gap in .*: shards of all ranks leave out 15360 values"):
        assert_handoff(source, [half], format="fp8_tensor")
    one_rank = {Q: whole[0], f"{Q}_scale": whole[1] * 1.0001}
    with pytest.raises(AssertionError, match="handoff/gather"):
        assert_handoff(source, {Q: whole[0], f"{Q}_scale": whole[1]}, format="fp8_tensor", one_rank=one_rank)


# Lists that convert other modules

LAYER = "model.layers.0."


def converted(*high: str) -> State:
    """Return an export of a layer in which all linears but these, and the head, are converted."""
    linears = ("mlp.gate", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    tensors: Tensors = {"lm_head.weight": torch.ones(8, 32)}
    for name in (*linears, "self_attn.indexer.wk"):
        fqn = f"{LAYER}{name}.weight"
        tensors[fqn], tensors[f"{fqn}_scale"] = quantized(torch.ones(8, 32), "fp8_row")
        if name in high:
            tensors |= {fqn: tensors[fqn].bfloat16()}
            del tensors[f"{fqn}_scale"]
    return state_of(tensors, "trainer")


class Other(NamedTuple):
    report: str
    high: tuple[str, ...]
    entries: list[str]
    rule: str
    module: str
    words: str


GATES = ("mlp.gate", "self_attn.indexer.wk")
OTHERS = [
    Other("prime-rl#2442", GATES, [f"{LAYER}mlp.gate", ".*wk"], "regex", "mlp.gate_proj", "high precision by"),
    Other("verl#7918", GATES, [f"{LAYER}mlp.gate", "wk"], "substring", "mlp.gate_proj", "high precision by"),
    Other("prime-rl#2910", GATES[:1], [], "exact", "mlp.gate", "float8_e4m3fn by"),
    Other("NeMo-RL#3614", GATES[1:], [f"{LAYER}mlp.gate", "indexer"], "segment", "mlp.gate", "high precision by"),
    Other("miles#2014", GATES[:1], ["re:.*gate$", "re:.*wk"], "compressed-tensors", GATES[1], "high precision by"),
    Other(
        "titan#4008", (*GATES, "self_attn.k_proj"), ["gate", "wk", "k_proj"], "segment", "self_attn.qkv_proj", "fused"
    ),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.report)
def test_a_list_that_converts_other_modules_is_found(other: Other) -> None:
    state = converted(*other.high)
    found = agreement(state, read_list({"quant_method": "", "ignored_layers": other.entries}, other.rule)).findings
    assert [finding.module for finding in found] == [f"{LAYER}{other.module}"]
    assert other.words in found[0].message
    dump = {name: {"precision": one.precision} for name, one in converted_in(state).items()}
    same = agreement(state, read_list({"modules": dump})).findings
    assert {finding.rule for finding in same} <= {"handoff/fused-parts"}
