"""A second list of what is converted: how it is read, how its names are taken, and where it disagrees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.plugins.handoff.agreement import MATCHERS, agreement, converted_in, read_list
from harness.plugins.handoff.reading import read_state
from harness.plugins.handoff.tensors import State
from tests.plugins.handoff.files import by_row, source, weights, write

LAYER = "model.layers.0."
CONVERTED = [f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj", f"{LAYER}self_attn.q_proj"]
HIGH = [f"{LAYER}mlp.gate", "lm_head", "model.embed_tokens"]


@pytest.fixture
def state(tmp_path: Any) -> State:
    quantized = by_row(weights(*(f"{name}.weight" for name in CONVERTED)))
    plain = source(weights(*(f"{name}.weight" for name in HIGH)))
    return read_state(write(tmp_path / "model.safetensors", quantized | plain))


def test_what_is_converted_is_seen_by_dtype_and_scale(state: State) -> None:
    found = converted_in(state)
    assert found.keys() == {*CONVERTED, f"{LAYER}mlp.gate", "lm_head"}
    assert {(one.precision, one.block, one.scale) for name, one in found.items() if name in CONVERTED} == {
        ("float8_e4m3fn", "row", "float32")
    }


@pytest.mark.parametrize(
    ("rule", "entry", "taken"),
    [
        ("exact", f"{LAYER}mlp.gate", ["mlp.gate"]),
        ("exact", "mlp.gate", []),
        ("prefix", f"{LAYER}mlp", ["mlp.gate", "mlp.gate_proj", "mlp.up_proj"]),
        ("substring", "mlp.gate", ["mlp.gate", "mlp.gate_proj"]),
        ("segment", "mlp.gate", ["mlp.gate"]),
        ("regex", r".*mlp.gate$", ["mlp.gate"]),
        ("regex", "(", []),
        ("wildcard", "*.mlp.gate*", ["mlp.gate", "mlp.gate_proj"]),
        ("compressed-tensors", "re:.*gate$", ["mlp.gate"]),
        ("transformers", "gate", ["mlp.gate"]),
        ("transformers", f"{LAYER}mlp.gate", ["mlp.gate"]),
        ("transformers", r"model.layers.\d+.mlp", ["mlp.gate", "mlp.gate_proj", "mlp.up_proj"]),
        ("vllm", f"{LAYER}mlp.gate", ["mlp.gate"]),
        ("torchao", "gate", ["mlp.gate", "mlp.gate_proj"]),
    ],
)
def test_an_entry_takes_other_modules_by_each_rule(rule: str, entry: str, taken: list[str]) -> None:
    names = [name for name in (*CONVERTED, *HIGH) if MATCHERS[rule](entry, name)]
    assert sorted(names) == sorted(f"{LAYER}{name}" for name in taken)


def test_a_list_that_agrees_says_what_other_rules_would_take(state: State) -> None:
    agreed = agreement(state, read_list({"ignored_layers": [f"{LAYER}mlp.gate", "lm_head"]}))
    assert agreed.findings == [] and agreed.notes[0].startswith(
        "5 modules beside agrees_with, its names taken as exact"
    )
    assert f"substring: {LAYER}mlp.gate, {LAYER}mlp.gate_proj" in agreed.notes[1] and len(agreed.notes) == 2


def test_an_entry_that_swallows_another_module_is_named_with_the_way_on(state: State) -> None:
    (wrong,) = agreement(state, read_list({"ignored_layers": [f"{LAYER}mlp.gate"]}, "substring")).findings
    assert wrong.message == f"{LAYER}mlp.gate_proj is float8_e4m3fn here, and high precision by agrees_with"
    assert (
        "takes it by substring, regex, and not by exact" in str(wrong.fix)
        and wrong.expected == f"high precision, taken by '{LAYER}mlp.gate'"
    )


OTHER_SCALE = {"precision": "float8_e4m3fn", "block": "row", "scale": "bfloat16"}
OTHER_DTYPE = {"the dtype of the scale": ("float32", "float8_e8m0fnu")}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"the block": ("row", "128x128")}),
        ({"quant_method": "fp8", "weight_block_size": None}, {"the block": ("row", "tensor")}),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, {"the block": ("row", "tensor"), **OTHER_DTYPE}),
        ({"modules": {f"{LAYER}mlp.up_proj": OTHER_SCALE}}, {"the dtype of the scale": ("float32", "bfloat16")}),
    ],
)
def test_each_field_is_compared_where_both_know_it(config: Any, fields: Any, state: State) -> None:
    ignored = {} if "modules" in config else {"modules_to_not_convert": [f"{LAYER}mlp.gate$", "lm_head"]}
    findings = agreement(state, read_list({**config, **ignored})).findings
    seen = {(one.rule, one.values["field"]): (one.found, one.expected) for one in findings}
    assert seen == {("handoff/agreement", field): values for field, values in fields.items()}


def test_modules_of_a_dump_and_activations_of_a_group_are_compared(state: State) -> None:
    (gone,) = agreement(state, read_list({"modules": {"model.other": {"precision": "float8_e4m3fn"}}})).findings
    assert (gone.rule, gone.module, gone.found) == ("handoff/converted", "model.other", None)
    group = {"weights": {"strategy": "channel"}, "input_activations": {"dynamic": True}}
    named = read_list({"quant_method": "compressed-tensors", "config_groups": {"0": group}, "ignore": ["re:.*gate$"]})
    assert named.default == ("float8_e4m3fn", "row", "", "dynamic") and named.matcher == "compressed-tensors"
    configured = state._replace(config={"quantization_config": {"activation_scheme": "static"}})
    (wrong, *_) = agreement(configured, named).findings
    assert wrong.first_line.startswith("the scheme of activations of ")


@pytest.mark.parametrize("words", [7, {}, {"layers": 1}, {"modules": {"a": {"size": "1"}}}, {"modules": {"a": 1}}])
def test_what_is_no_list_is_said(words: Any, tmp_path: Any) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps(words))
    with pytest.raises(HarnessError) as raised:
        read_list(path)
    assert raised.value.where == str(path) and raised.value.fix
    with pytest.raises(HarnessError, match="no rule is named 'sounds'"):
        read_list({"ignored_layers": []}, "sounds")
