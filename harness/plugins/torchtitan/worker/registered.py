"""Debug models of torchtitan's registry, as its own tests train them: what differs from a case's model is theirs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import Linear

from harness.matrix.linears import OUTPUT_FQN
from harness.matrix.model import Model
from harness.plugins.torchtitan import NAME
from harness.plugins.torchtitan.worker.model import converted

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

    from harness.matrix.case import Case

_FAMILIES: dict[str, Any] = {f"{NAME}.llama3": llama3, f"{NAME}.qwen3": qwen3}
_HEAD = "lm_head"


def registered_spec(case: Case) -> ModelSpec:
    """Return the model of the registry that the target is named after, with the vocabulary and the recipe of the case.

    ValueError for a case that asks for other sizes.
    """
    vocabulary = {name: getattr(case.model, name) for name in ("vocab_size", "pad_vocab_to_multiple_of")}
    if case.model != msgspec.structs.replace(Model(), **vocabulary):
        raise ValueError(f"a model of torchtitan's registry has its own sizes: for others give --target {NAME}")
    spec = _FAMILIES[case.target].model_registry("debugmodel")
    model, rows = spec.model, case.model.padded_vocab_size
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = rows
    if case.float8.enabled:
        kept = [_HEAD if part == OUTPUT_FQN else part for part in case.float8.filter_fqns]
        head = () if case.float8.output_layer else (_HEAD,)
        linears = [fqn for fqn, *_ in model.traverse(Linear.Config)]
        model = converted(case, model, linears, (*kept, *head))
    return dataclasses.replace(spec, model=model, state_dict_adapter=None)
