"""torchtitan's job configurations: what a TOML file or flags of torchtitan 0.2 ask for, as a case.

A case keeps how a job is parallel, converted, checkpointed and compiled, and trains a small model for a few steps. What
was made smaller is a note, and so is what no case has and changes no FP8 number. What cannot be left out is an error
that names it. The options and their defaults are those of torchtitan/config/job_config.py in 0.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes
from harness.matrix.case import MODEL_PRESETS, Case
from harness.matrix.layout import DP_AXES, MESH_AXES, REST, left_over, ranks_of
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN
from harness.matrix.options import options_of_flags, options_of_toml
from harness.matrix.rules import exclusions
from harness.matrix.scope import out_of_scope
from harness.matrix.spellings import canonical, option_of, recipe_named
from harness.matrix.targets import TORCHTITAN

MAX_RANKS = 8  # that fit on two cores

_FLOAT8 = "quantize.linear.float8"  # the section of the float8 options; `spellings.toml` has its older names


class Imported(NamedTuple):
    """The case of a configuration, and what of it the case does not have."""

    case: Case
    notes: tuple[str, ...]


class _Config:
    """Values by dotted name of torchtitan 0.2.2, and which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {canonical(name): value for name, value in values.items()}
        self.read: set[str] = set()

    def __call__(self, name: str, default: Any) -> Any:
        self.read.add(name)
        return self.values.get(name, default)


def import_toml(text: str, *, where: str, ranks: int | None = None) -> Imported:
    """The case of a TOML file. `ranks`: of the whole job, for `data_parallel_shard_degree = -1`."""
    try:
        values = options_of_toml(text)
    except ValueError as error:
        raise HarnessError(f"not a TOML file: {error}.", where=where, fix="give a file of torchtitan.") from error
    return _imported(_Config(values), where=where, ranks=ranks)


def import_flags(text: str, *, where: str, ranks: int | None = None) -> Imported:
    """The case of flags such as `--parallelism.tensor_parallel_degree 4 --compile.enable`."""
    return _imported(_Config(options_of_flags(text, where=where)), where=where, ranks=ranks)


def _imported(config: _Config, *, where: str, ranks: int | None) -> Imported:
    if not any("." in name for name in config.values):
        raise HarnessError("holds no option of torchtitan.", where=where, fix="give sections such as [parallelism].")
    notes: list[str] = []
    _refuse(config, where)
    values: dict[str, object] = {"target": TORCHTITAN, **_layout(config, notes, ranks, where)}
    values |= _model(config, notes, int(str(values["tp"])))
    values |= _float8(config, notes, where, shards=values[REST] != 1)
    values |= _checkpointing(config, where)
    values |= _compile(config, notes, values)
    values |= _training(config, notes, values)
    others = (name for name in config.values if not name.startswith((*_NEUTRAL, *_OF_CASES)))
    unread = sorted(name for name in others if name not in config.read)
    notes += [f"{name} = {config.values[name]}: no case has it" for name in unread]
    case = case_from_axes(values)
    for rule in exclusions(case):
        fix = f"change {' or '.join(rule.axes)}."
        raise HarnessError(f"no case has it: {rule.reason}.", where=where, fix=fix)
    return Imported(case, tuple(notes))


# What changes neither what is computed nor how.
_NEUTRAL = ("job.", "profiling.", "metrics.", "checkpoint.", "comm.", "memory_estimation.", "validation.", "debug.")
# What a case has numbers of its own for, which one note tells together.
_OF_CASES = (
    *(f"training.{name}" for name in ("steps", "local_batch_size", "global_batch_size", "seq_len", "dataset")),
    "training.mixed_precision_reduce",
    *(f"optimizer.{name}" for name in ("lr", "name", "eps", "beta1", "beta2", "weight_decay", "implementation")),
    "lr_scheduler.",
    *(f"model.{name}" for name in ("hf_assets_path", "tokenizer_path")),
)


def _refuse(config: _Config, where: str) -> None:
    for name in [name for name in config.values if name.startswith("parallelism.") and name.endswith("_degree")]:
        outside = out_of_scope(name.rpartition(".")[2])
        if outside is not None and (degree := config(name, 1)) not in (1, -1):
            raise HarnessError(
                f"{name} = {degree}: no case has {outside.name}: {outside.reason}.",
                where=where,
                fix=f"set {name} to 1.",
            )
    model = config("model.name", "llama3")
    if model != "llama3":
        fix = "write a target of your own for it: docs/your-own-trainer.md."
        raise HarnessError(f"model.name = {model}: a case of torchtitan trains its llama3.", where=where, fix=fix)


def _layout(config: _Config, notes: list[str], ranks: int | None, where: str) -> dict[str, object]:
    asked = {axis: int(config(option_of(axis).name, 1)) for axis in MESH_AXES}
    asked[REST] = int(config(option_of(REST).name, config(option_of("dp").name, -1)))
    if asked[REST] == -1:
        asked[REST] = 2 if ranks is None else left_over(ranks, asked, where=where)
        if ranks is None:
            notes.append(f"{option_of(REST).name} = -1, all other ranks: 2 here; --ranks N says how many")
    kept = _fitting(asked)
    notes += [f"{name} {degree} is {kept[name]} here" for name, degree in asked.items() if kept[name] != degree]
    return {
        **kept,
        "loss_parallel": bool(config("parallelism.enable_loss_parallel", True))
        and not config("parallelism.disable_loss_parallel", False),
        "async_tp": bool(config("parallelism.enable_async_tensor_parallel", False)) and asked["tp"] > 1,
        "reshard_after_forward": config("parallelism.fsdp_reshard_after_forward", "default")
        if asked[REST] > 1
        else "default",
    }


def _fitting(degrees: Mapping[str, int]) -> dict[str, int]:
    """The degrees, halved from the largest on until the ranks fit; what is above 1 stays above 1."""
    kept = dict(degrees)
    while ranks_of(kept) > MAX_RANKS:
        largest = max(kept, key=lambda name: kept[name])
        kept[largest] = max(2, kept[largest] // 2)
        if max(kept.values()) <= 2:
            break
    return kept


def _model(config: _Config, notes: list[str], tp: int) -> dict[str, object]:
    flavor = config("model.flavor", "debugmodel")
    if any(word in flavor for word in ("flex", "varlen")):
        notes.append(f"model.flavor = {flavor}: attention is torch's scaled_dot_product_attention here")
    tiny = MODEL_PRESETS["tiny"]
    notes.append(f"model.flavor = {flavor}: {tiny.layers} layers of dim {tiny.dim} here, of the same kind")
    heads = max(tiny.heads, tp)
    return {"heads": heads, "kv_heads": heads} if heads != tiny.heads else {}


def _float8(config: _Config, notes: list[str], where: str, *, shards: bool) -> dict[str, object]:
    converters = config("model.converters", [])
    converters = [converters] if isinstance(converters, str) else list(converters)
    if config(f"{_FLOAT8}.enable_float8_linear", False):
        converters = [*converters, "float8"]
    others = [name for name in converters if not name.endswith("float8")]
    if others:
        fix = "leave it out; cases convert linears to float8."
        raise HarnessError(f"model.converters = {', '.join(others)}: no case has it.", where=where, fix=fix)
    if not converters:
        notes.append("model.converters has no float8: the case is BF16")
        return {}
    given = [name for name in config.values if name.rpartition(".")[0] == _FLOAT8]
    option = {name.rpartition(".")[2]: config(name, None) for name in given}
    if option.get("emulate"):
        notes.append("emulate: FP8 is never emulated; the virtual device runs the real path")
    filters = option.get("filter_fqns") or []
    filters = [filters] if isinstance(filters, str) else list(filters)
    known = [f"layers.0.{name}" for name in BLOCK_LINEARS]
    kept = [entry for entry in filters if any(entry in fqn for fqn in known)]
    lost = [entry for entry in filters if entry not in kept and entry not in OUTPUT_FQN]
    notes += [f"filter_fqns {entry}: matches no linear of the Llama" for entry in lost]
    gathers = bool(option.get("enable_fsdp_float8_all_gather"))
    if gathers and not shards:
        notes.append("enable_fsdp_float8_all_gather: without shards nothing is gathered")
        gathers = False
    return {
        "recipe": recipe_named(option.get("recipe_name") or "tensorwise"),
        "fp8_all_gather": gathers,
        "precompute_scale": gathers and bool(option.get("precompute_float8_dynamic_scale_for_fsdp")),
        "filter_fqns": kept,
        "output_layer": not any(entry in OUTPUT_FQN for entry in filters),
    }


def _checkpointing(config: _Config, where: str) -> dict[str, object]:
    mode = config("activation_checkpoint.mode", "selective")
    option = str(config("activation_checkpoint.selective_ac_option", "2"))
    if mode == "memory_budget":
        what = "activation_checkpoint.mode = memory_budget: the compiler chooses what is computed again."
        raise HarnessError(what, where=where, fix="choose selective, full or none.")
    if mode != "selective":
        return {"checkpointing": mode}
    if option == "op":
        return {"checkpointing": "selective_op"}
    return {"checkpointing": "selective_layer", "checkpoint_every": min(int(option), MODEL_PRESETS["tiny"].layers)}


def _compile(config: _Config, notes: list[str], layout: Mapping[str, object]) -> dict[str, object]:
    components = config("compile.components", ["model", "loss"])
    backend = config("compile.backend", "inductor")
    if not config("compile.enable", False) or "model" not in components:
        if layout["async_tp"]:
            notes.append("async TP without compiled blocks is plain TP")
        return {"async_tp": False}
    if backend == "inductor":
        notes.append("compile.backend = inductor: graphs are executed here; compile = inductor generates code")
    # torchtitan hands a compiled block the output of the embedding while it is still being gathered.
    return {"compile": "graph", "wait_for_embedding": False} if layout["tp"] != 1 else {"compile": "graph"}


def _training(config: _Config, notes: list[str], layout: Mapping[str, object]) -> dict[str, object]:
    wide = config("training.dtype", "float32")
    narrow = config("training.mixed_precision_param", "bfloat16")
    if config("training.max_norm", 1.0):
        notes.append("training.max_norm: clipping is compared in float64 alone: set dtype and max_norm for it")
    notes.append("data, steps, batch, sequence length and learning rate are those of a case")
    dtype = "bfloat16" if "bfloat16" in (wide, narrow) else "float32"
    return {"dtype": dtype, "global_batch": max(8, ranks_of(layout, DP_AXES))}
