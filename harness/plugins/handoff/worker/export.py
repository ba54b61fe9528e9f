"""The export of weights in each format, by torch alone: what a case is handed off with where nobody gives an exporter.

It shares no code with what judges it. Matrices are gathered, then quantized as those who wrote the format do.
"""

import re
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from harness.plugins.handoff.formats import Format
from harness.plugins.handoff.numbers import FLOATS, TORCH_NAMES

State = Mapping[str, torch.Tensor]
# What engines keep in high precision: both ends and the router.
_HIGH = re.compile(r"(^|\.)(tok_embeddings|embed_tokens|output|lm_head|router\.gate|mlp\.gate)\.weight$")
_LEAST = 1e-4, 2.0**-118  # of an amax: DeepSeek's, and where a scale of MXFP8 has its smallest exponent


def quantized(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in float8 with its scales: the amax of a block by the largest number, then the cast."""
    (rows, columns), largest = weight.shape, FLOATS[form.dtype].largest
    height, width = form.block[0] or rows, form.block[1] or columns
    padded = F.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
    amax = blocks.abs().amax((2, 3))
    if form.clips:
        scale = torch.exp2(torch.floor(torch.log2(amax.clamp(min=_LEAST[1]))) - 8)
    else:
        scale = amax.clamp(min=_LEAST[0]) / largest
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if form.power_of_two else scale
    data = (blocks / scale[:, :, None, None]).clamp(-largest, largest).transpose(1, 2).reshape(padded.shape)
    stored = (1 / scale if form.divides else scale).to(getattr(torch, TORCH_NAMES[form.scales[0]]))
    data = data[:rows, :columns].to(getattr(torch, TORCH_NAMES[form.dtype])).contiguous()
    return data, stored if any(form.block) else stored.reshape(())


def export(state: State, form: Format) -> dict[str, torch.Tensor]:
    """Return what an engine gets of a state of DTensors or plain tensors: experts one by one, the rest in bfloat16."""
    made: dict[str, torch.Tensor] = {}
    for fqn, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, weight in _matrices(fqn, whole):
            if weight.ndim != 2 or not form.dtype or _HIGH.search(name):
                made[name] = weight.to(torch.bfloat16, copy=True)
            else:
                made[name], made[name + form.suffixes[0]] = quantized(weight, form)
    return made


def _matrices(fqn: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if whole.ndim != 3:
        yield fqn, whole
        return
    stem, _, part = fqn.rpartition(".")
    yield from ((f"{stem}.{expert}.{part}.weight", weight) for expert, weight in enumerate(whole))


def load(made: State, form: Format, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return what a trainer loads of an export: dequantized, in its dtype."""
    state: dict[str, torch.Tensor] = {}
    for name, data in made.items():
        scale = made.get(name + form.suffixes[0]) if form.dtype else None
        if scale is None:
            if not (form.suffixes and name.endswith(form.suffixes[0])):
                state[name] = data.to(dtype)
            continue
        grid = (1 / scale.float() if form.divides else scale.float()).reshape(form.blocks(*data.shape))
        height, width = form.block[0] or data.shape[0], form.block[1] or data.shape[1]
        wide = grid.repeat_interleave(height, 0)[: data.shape[0]].repeat_interleave(width, 1)[:, : data.shape[1]]
        state[name] = (data.float() * wide).to(dtype)
    return state
