"""torchtitan's Qwen3 in the place of its Llama 3 where a case has experts: the same blocks, and mixtures of experts.

Its routed experts find their tokens in a dispatcher, which is no module. Two modules that return what they are given
stand before and behind its exchange, so that probes see what a rank sends and what comes back.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchtitan.components.quantization import Float8GroupedExpertsConverter, MXFP8GroupedExpertsConverter
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, TorchAOTokenDispatcher
from torchtitan.models.qwen3 import Qwen3Model

from harness.matrix.model import BALANCE_COEFFICIENT

if TYPE_CHECKING:
    from harness.matrix.case import Case

_WEIGHTS = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}  # by the names of `linears.py`


def moe_config(case: Case, init: dict[str, Callable[..., object]]) -> MoE.Config:
    """Return the mixture of a case. A choice by sigmoids is normalized, as in torchtitan's DeepSeek-V3."""
    model = case.model
    dim, experts, top_k = model.shape.dim, model.experts, model.top_k
    return make_moe_config(
        num_experts=experts,
        router=make_router_config(
            dim=dim,
            num_experts=experts,
            gate_param_init=init,
            top_k=top_k,
            score_func=model.router,
            route_norm=model.router == "sigmoid",
        ),
        routed_experts=make_routed_experts_config(
            dim=dim,
            hidden_dim=model.expert_dim,
            num_experts=experts,
            top_k=top_k,
            param_init=dict.fromkeys(_WEIGHTS.values(), init["weight"]),
            comm_backend="standard",
        ),
        shared_experts=make_ffn_config(dim=dim, hidden_dim=model.expert_dim, w1_param_init=init, w2w3_param_init=init),
        load_balance_coeff=BALANCE_COEFFICIENT if model.balance else None,
    )


def converted_experts(case: Case, model: Qwen3Model.Config) -> Qwen3Model.Config:
    """Return the model with grouped matmuls of the case's recipe. ValueError without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "torchtitan pads the tokens of float8 experts with code of torchao that needs Triton: install it"
        )
    traits = case.float8.grouped_traits
    if traits.kernel == "mx":
        return MXFP8GroupedExpertsConverter.Config(pad_multiple=traits.group_multiple).build().convert(model)
    return Float8GroupedExpertsConverter.Config().build().convert(model)


class Passed(nn.Module):
    """Returns the rows that it is given, beside how many every expert has."""

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return rows


def add_seams(moe: Any) -> None:
    """Give a mixture the names of `linears.py`, and what probes need to see the exchange of tokens.

    `sent` is called with the rows that a rank sends to experts, `returned` with those that come back, both with the
    counts that the dispatcher is given.
    """
    routed, sent, returned = moe.routed_experts, Passed(), Passed()
    dispatcher, inner = routed.token_dispatcher, routed.inner_experts
    given: dict[str, torch.Tensor] = {}

    def seen_by(passed: Passed, method: Callable[..., Any]) -> None:
        stock = getattr(dispatcher, method.__name__)

        def seen(*args: Any, **options: Any) -> Any:
            result = stock(*args, **options)
            if not isinstance(result, tuple):
                return passed(result, given["counts"])
            return passed(result[0], given["counts"]), *result[1:]

        setattr(dispatcher, method.__name__, seen)

    routed.register_forward_pre_hook(lambda _, args: given.update(counts=args[3]))
    seen_by(sent, AllToAllTokenDispatcher._local_reorder)
    children: dict[str, nn.Module] = {"experts": inner, "sent": sent}
    if dispatcher.ep_mesh is not None or isinstance(dispatcher, TorchAOTokenDispatcher):  # else experts return them
        alone, shared = AllToAllTokenDispatcher._unpermute, AllToAllTokenDispatcher._combine_token_exchange
        seen_by(returned, alone if dispatcher.ep_mesh is None else shared)
        children["returned"] = returned
    put_first(moe._modules, children)
    put_first(inner._parameters, {name: inner._parameters[own] for name, own in _WEIGHTS.items()})
    if moe.expert_bias_E is not None:
        put_first(moe._buffers, {"expert_bias": moe.expert_bias_E})


def put_first(names: dict[str, Any], named: dict[str, Any]) -> None:
    """Let what a module has be found by these names first: its own still hold."""
    others = dict(names)
    names.clear()
    names.update(named | others)
