"""What reads and writes such files: torch's DCP, safetensors, torchao's quantized checkpoints, the FP8 of transformers.

A test is skipped where its package is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from fp8_harness import assert_handoff
from harness.errors import HarnessError
from harness.plugins.handoff.agreement import MATCHERS
from harness.plugins.handoff.numbers import decoded
from harness.plugins.handoff.reading import read_state
from harness.worker.virtual import casts
from tests.plugins.handoff.files import write
from tests.plugins.handoff.trainers import LAYOUTS, exported, weights


def bits(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().view(torch.uint8).numpy()


def save(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """Write what torch has as safetensors, by hand, with its config.json."""
    from harness.plugins.handoff.numbers import OF_TORCH

    raw = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = OF_TORCH[str(tensor.dtype).removeprefix("torch.")]
        raw[name] = dtype, flat.view(f"u{tensor.element_size()}").reshape(tuple(tensor.shape))
    write(folder / "model.safetensors", raw)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


# torch.distributed.checkpoint


def saved_on_a_rank(layout: str, folder: str) -> int:
    """Save the weights of a layout as one checkpoint of all ranks."""
    state = LAYOUTS[layout][1]()
    dcp.save(
        {"model": {name: each.detach() for name, each in state.items()}, "step": 3},
        storage_writer=FileSystemWriter(folder),
    )
    return len(state)


@pytest.mark.parametrize("layout", ["fsdp2-tp2", "ep2"])
def test_a_checkpoint_of_ranks_is_the_source(layout: str, tmp_path: Path, fp8_ranks: Callable[..., list[Any]]) -> None:
    fp8_ranks(saved_on_a_rank, LAYOUTS[layout][0], layout, str(tmp_path / "saved"))
    state, whole = read_state(tmp_path / "saved"), weights()
    assert state.not_tensors == ("step",) and {name.removeprefix("model.") for name in state.tensors} == whole.keys()
    for name, held in state.tensors.items():
        read = decoded(held.read((slice(None),) * len(held.shape)), held.dtype)
        assert torch.equal(torch.from_numpy(read), whole[name.removeprefix("model.")]), name
    renames = [(r"^model\.model", "model")]
    assert_handoff(tmp_path / "saved", exported(whole, "fp8_row"), format="fp8_row", renames=renames)
    other = {**whole, "model.layers.0.input_layernorm.weight": torch.ones(160)}
    with pytest.raises(AssertionError, match=r"handoff/rounding in model\.model\.layers\.0\.input_layernorm"):
        assert_handoff(other, tmp_path / "saved", format="high_precision", renames=renames)


def saved_for_hugging_face(layout: str, folder: str) -> None:
    """Save the weights of a layout as safetensors, a file for each rank."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    state = {name: each.detach() for name, each in LAYOUTS[layout][1]().items()}
    writer = HuggingFaceStorageWriter(folder, dict.fromkeys(state, 1), save_distributed=True)
    dcp.save(state, storage_writer=writer)


def test_files_of_ranks_that_torch_writes_for_hugging_face_are_put_together(
    tmp_path: Path, fp8_ranks: Callable[..., list[Any]]
) -> None:
    pytest.importorskip("safetensors")
    fp8_ranks(saved_for_hugging_face, 4, "fsdp2-tp2", str(tmp_path))
    assert len([*tmp_path.glob("shard-*.safetensors")]) == 4
    assert_handoff(tmp_path, exported(weights(), "mxfp8"), format="mxfp8")


def test_a_checkpoint_that_is_cut_off_is_named_with_tensor_and_byte(tmp_path: Path) -> None:
    dcp.save(
        {name: each for name, each in weights().items() if "layers.0" in name},
        checkpoint_id=str(tmp_path),
        no_dist=True,
    )
    file = next(tmp_path.glob("*.distcp"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HarnessError, match=r"it is truncated: tensor model\.layers\.0.* ends at byte") as cut:
        read_state(tmp_path)
    assert cut.value.where == str(file)
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(HarnessError, match=r"is not as torch\.save writes it"):
        read_state(tmp_path)
    file.unlink()
    with pytest.raises(HarnessError, match="which is not in the folder"):
        read_state(tmp_path)


# safetensors


def test_what_safetensors_writes_and_reads_is_the_same(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    made = exported(weights(), "fp8_row")
    package.save_file(made, tmp_path / "model.safetensors")
    assert_handoff(weights(), tmp_path, format="fp8_row")
    back = package.load_file(tmp_path / "model.safetensors")
    assert_handoff(weights(), back, format="fp8_row")
    ours = package.load_file(save(tmp_path / "ours", made) / "model.safetensors")
    assert all((bits(ours[name]) == bits(tensor)).all() for name, tensor in made.items())


# torchao


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 192), nn.Linear(192, 160, bias=False)).to(torch.bfloat16)


def test_torchaos_float8_weights_are_right_in_memory_and_in_its_checkpoint(tmp_path: Path) -> None:
    casts.install()  # before torchao's MXFP8 is imported
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = linears()
    source = {name: each.clone() for name, each in model.state_dict().items()}
    quantize_(model, Float8WeightOnlyConfig())
    assert_handoff(source, model.state_dict(), format="fp8_row")
    flatten = pytest.importorskip("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
    flat, _ = flatten(model.state_dict())
    assert "0._weight_qdata" in flat
    assert_handoff(source, save(tmp_path, flat), format="fp8_row")
    flat["1._weight_scale"] = flat["1._weight_scale"].flip(0)
    with pytest.raises(AssertionError, match=r"handoff/scale in 1._weight_qdata: .* they are in reverse"):
        assert_handoff(source, save(tmp_path, flat), format="fp8_row")


@pytest.mark.parametrize("rounding", ["floor", "rceil", "ceil", "even"])
def test_torchaos_mxfp8_is_right_and_idempotent_where_scales_are_not_rounded_up(rounding: str) -> None:
    casts.install()
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_dtype, to_mx

    mode = ScaleCalculationMode(rounding)
    source = {name: each.bfloat16() for name, each in weights().items() if name.endswith("_proj.weight")}

    def export(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        both = {name: to_mx(weight, torch.float8_e4m3fn, 32, mode) for name, weight in state.items()}
        return {name: data for name, (_, data) in both.items()} | {f"{name}_scale": both[name][0] for name in both}

    first = export(source)
    of_torchao = {name: MXTensor.to_mx(each, torch.float8_e4m3fn, 32, mode) for name, each in source.items()}
    assert_handoff(source, of_torchao, format="mxfp8")
    back = {
        name: to_dtype(first[name], first[f"{name}_scale"], torch.float8_e4m3fn, 32, torch.bfloat16) for name in source
    }
    if mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.EVEN):
        assert_handoff(source, first, format="mxfp8", again=export(back))
        return
    assert_handoff(source, first, format="mxfp8", again=export(back), idempotent=False)
    with pytest.raises(AssertionError, match="handoff/not-idempotent"):
        assert_handoff(source, first, format="mxfp8", again=export(back))


# transformers


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_the_fp8_of_transformers_writes_and_loads_what_is_right(scale_fmt: str, tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": scale_fmt}
    quantizer = type("Quantizer", (), {"quantization_config": type("Config", (), config)()})()
    names = [f"model.layers.{at}.mlp.{name}.weight" for at in range(2) for name in ("gate_proj", "up_proj")]
    source = {name: torch.randn(256, 384).to(torch.bfloat16) for name in names}
    source["model.layers.1.mlp.up_proj.weight"][:128, :128] = 0
    made: dict[str, torch.Tensor] = {}
    for name, weight in source.items():
        made |= fp8.Fp8Quantize(quantizer).convert({name: weight})
    folder = save(tmp_path, made, config)
    assert_handoff(source, folder)
    loaded = {}
    for name in source:
        inputs = {"weight": made[name], "weight_scale_inv": made[f"{name}_scale_inv"]}
        loaded[name] = fp8.Fp8Dequantize(quantizer).convert(inputs)["weight"].to(torch.bfloat16)
    assert_handoff(folder, loaded, format="high_precision")
    loaded["model.layers.0.mlp.up_proj.weight"] = made["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16)
    with pytest.raises(AssertionError, match=r"handoff/rounding in model.layers.0.mlp.up_proj.weight"):
        assert_handoff(folder, loaded, format="high_precision")


def test_a_model_of_transformers_loads_the_checkpoint_that_was_judged(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 160}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    source = {name: each.clone() for name, each in model.state_dict().items()}
    made: dict[str, torch.Tensor] = {}
    for name, weight in source.items():
        if name.endswith("_proj.weight"):
            own = exported({name: weight}, "fp8_block128")
            made |= {name: own[name], f"{name}_scale_inv": own[f"{name}_scale"]}
        elif name != "lm_head.weight":
            made[name] = weight
    save(tmp_path, made)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    written = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert_handoff(source, tmp_path, agrees_with=tmp_path / "config.json")
    more = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True), "dtype": torch.bfloat16}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **more)
    assert_handoff(tmp_path, loaded.state_dict(), format="high_precision")


NAMES = ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.10.mlp.experts.1.up_proj", "lm_head")
ENTRIES = ("gate", "mlp.gate", "model.layers.0.mlp.gate", r"model.layers.\d+.mlp", "re:.*gate$", "re:model", "lm_head")


@pytest.mark.parametrize(
    ("rule", "module", "function"),
    [
        ("transformers", "transformers.quantizers.quantizers_utils", "should_convert_module"),
        ("compressed-tensors", "compressed_tensors.utils.match", "match_name"),
    ],
)
def test_names_are_taken_as_the_package_takes_them(rule: str, module: str, function: str) -> None:
    takes = getattr(pytest.importorskip(module), function)
    for entry in ENTRIES:
        for name in NAMES:
            theirs = not takes(name, [entry]) if rule == "transformers" else takes(name, entry)
            assert MATCHERS[rule](entry, name) == bool(theirs), (entry, name)
