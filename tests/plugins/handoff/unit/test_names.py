"""Which weight is which: names of trainers and exporters, stacks of experts, fused weights, tied ends; and formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import HarnessError
from harness.plugins.handoff.formats import FORMATS, format_named
from harness.plugins.handoff.library import judge
from harness.plugins.handoff.pairing import NothingMatches, renamed
from harness.verdict import Finding
from tests.plugins.handoff.files import Tensors, by_row, source, stored, weights, write


def found(tmp_path: Path, ours: Tensors, theirs: Tensors, **more: Any) -> tuple[Finding, ...]:
    paths = write(tmp_path / "ours.safetensors", ours), write(tmp_path / "theirs" / "model.safetensors", theirs)
    return judge(*paths, **{"format": "fp8_row", **more}).findings


def told(findings: tuple[Finding, ...]) -> list[tuple[str, str | None]]:
    return [(finding.rule, finding.module) for finding in findings]


@pytest.mark.parametrize(
    ("trainer", "hf"),
    [
        ("layers.3.attention.wq.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("layers.3.feed_forward.w2.weight", "model.layers.3.mlp.down_proj.weight"),
        (
            "_orig_mod.layers.3._checkpoint_wrapped_module.ffn_norm.weight",
            "model.layers.3.post_attention_layernorm.weight",
        ),
        ("layers.3.moe.experts.w1", "model.layers.3.mlp.experts.gate_proj"),
        ("layers.3.moe.router.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("layers.3.mlp.experts.w13_weight", "layers.3.mlp.experts.gate_up_proj.weight"),
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_weight_has_one_name(trainer: str, hf: str) -> None:
    assert renamed(trainer) == renamed(hf)


STEM = "model.layers.0.self_attn."


def test_fused_weights_are_their_parts_on_either_side(tmp_path: Path) -> None:
    parts = weights(*(f"{STEM}{name}_proj.weight" for name in "qkv"))
    fused = {f"{STEM}qkv_proj.weight": np.concatenate(list(parts.values()))}
    assert found(tmp_path, source(parts), by_row(fused)) == ()
    assert found(tmp_path, source(fused), by_row(parts)) == ()
    swapped = {f"{STEM}qkv_proj.weight": np.concatenate([parts[f"{STEM}{name}_proj.weight"] for name in "kqv"])}
    (wrong,) = found(tmp_path, source(parts), by_row(swapped))
    assert wrong.rule == "handoff/order" and "rows 8-15 where 0-7 belong" in str(wrong.found)


def test_stacks_of_experts_are_experts_on_either_side(tmp_path: Path) -> None:
    stem = "model.layers.0.mlp.experts"
    each = weights(*(f"{stem}.{expert}.{name}_proj.weight" for expert in range(3) for name in ("gate", "up")))
    pairs = [[each[f"{stem}.{expert}.{name}_proj.weight"] for name in ("gate", "up")] for expert in range(3)]
    stack = {f"{stem}.gate_up_proj": np.stack([np.concatenate(pair) for pair in pairs])}
    quantized = by_row(each)
    names = [[f"{stem}.{expert}.{name}_proj.weight" for name in ("gate", "up")] for expert in range(3)]
    data, scales = (
        np.stack([np.concatenate([quantized[f"{name}{suffix}"][1] for name in pair]) for pair in names])
        for suffix in ("", "_scale")
    )
    fused = {f"{stem}.gate_up_proj": ("F8_E4M3", data), f"{stem}.gate_up_proj_scale": ("F32", scales)}
    assert found(tmp_path, source(each), fused) == () == found(tmp_path, source(stack), quantized)
    assert found(tmp_path, source(stack), fused) == ()
    moved = {name: (dtype, np.roll(raw, 1, axis=0)) for name, (dtype, raw) in fused.items()}
    first, *others = found(tmp_path, source(stack), moved)
    assert len(others) == 2 and first.message == f"{stem}.gate_up_proj[0] holds the weights of {stem}.gate_up_proj[2]"


def test_tied_ends_may_be_on_one_side_and_others_may_not(tmp_path: Path) -> None:
    ours = weights("model.embed_tokens.weight", "a.weight")
    head = {"lm_head.weight": ours["model.embed_tokens.weight"]}
    row = by_row({"a.weight": ours["a.weight"]})
    ends = source({name: each for name, each in ours.items() if name != "a.weight"})
    assert (
        found(tmp_path, source(ours | head), row | ends)
        == ()
        == found(tmp_path, source(ours), row | ends | source(head))
    )
    other = source({"lm_head.weight": -ours["model.embed_tokens.weight"]})
    assert told(found(tmp_path, source(ours), row | ends | other)) == [("handoff/extra", "lm_head.weight")]
    assert told(found(tmp_path, source(ours) | other, row | ends)) == [("handoff/missing", "lm_head.weight")]


def test_two_weights_of_one_name_and_no_name_at_all_are_said(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"are both layers\.0\.norm\.weight"):
        found(tmp_path, source(weights("model.layers.0.norm.weight", "layers.0.norm.weight")), {}, format="fp8_row")
    ours, theirs = source(weights("a.weight")), by_row(weights("transformer.a.weight"))
    with pytest.raises(NothingMatches, match=r"no name matches one of .*: transformer\.a\.weight here, a\.w"):
        found(tmp_path, ours, theirs)
    assert found(tmp_path, ours, theirs, renames=[(r"^transformer\.", "")]) == ()


def test_a_source_that_is_not_finite_never_passes(tmp_path: Path) -> None:
    ours = weights("a.weight")
    broken = {"a.weight": np.where(np.arange(64) == 3, np.nan, ours["a.weight"])}
    (quantized,) = found(tmp_path, source(broken), by_row(ours))
    assert quantized.message == "8 values are not finite in a.weight of the source"
    (plain,) = found(tmp_path, source(broken), source(broken), format="high_precision")
    assert (plain.rule, plain.values["count"]) == ("handoff/number", 8)


def test_scales_of_activations_are_no_weights(tmp_path: Path) -> None:
    ours = weights("a.weight")
    more = {"a.input_scale": stored(np.ones(()), "F32"), "a.weight_shape": ("I64", np.array([8, 64]))}
    assert found(tmp_path, source(ours), by_row(ours) | more) == ()


def compressed(**weights: Any) -> Mapping[str, Any]:
    group = {"weights": {"num_bits": 8, "type": "float", **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


CONFIGS: list[tuple[Mapping[str, Any], str]] = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block128"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "fp8_block128_ue8m0"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor"),
    ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "mxfp8"),
    ({"quant_method": "fbgemm_fp8"}, "fp8_row"),
    ({"quant_algo": "modelopt"}, "fp8_tensor"),
    (compressed(strategy="channel"), "fp8_row"),
    (compressed(strategy="tensor"), "fp8_tensor"),
    (compressed(strategy="block", block_structure=[128, 128]), "fp8_block128"),
]


@pytest.mark.parametrize(("config", "name"), CONFIGS)
def test_a_configuration_says_the_format(config: Mapping[str, Any], name: str) -> None:
    assert format_named(None, config, where="config.json").name == name


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("fp4", {}, "unknown format 'fp4'"),
        (None, {}, "it has no quantization_config"),
        (None, {"quant_method": "awq"}, r"quant_method awq\) is none of these"),
        (None, {"quant_method": "fp8", "weight_block_size": [64, 64]}, "is none of these"),
        (None, {"quant_method": "compressed-tensors", "config_groups": []}, "is none of these"),
    ],
)
def test_a_format_that_is_not_known_is_said_with_those_that_are(name: Any, config: Any, words: str) -> None:
    with pytest.raises(HarnessError, match=words) as raised:
        format_named(name, config, where="config.json")
    assert all(each in str(raised.value.fix) for each in FORMATS)
