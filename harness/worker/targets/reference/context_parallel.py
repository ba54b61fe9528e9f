"""Context parallelism: ranks share the positions of every sequence, and gather keys and values for attention.

torch's own context parallelism has no CPU kernel. Its all-gather form does the same: every rank gathers what all ranks
of its sequences have of keys and values, and attends with its queries, under the causal mask of their positions.

The single-rank reference has all pieces at once, one behind the other in the batch: [ranks * batch, positions].
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from harness.matrix.case import Case
from harness.matrix.layout import positions_of_ranks
from harness.worker.targets.in_pieces import add_up_in_norms, use_pieces
from harness.worker.targets.reference.model import Attention, Context, Llama, apply_rope, attend
from harness.worker.targets.target import World
from harness.worker.tensors.ranks import STACKED, Given, along, on_ranks, whole

Tensor = torch.Tensor
_SEQUENCE = 1  # the dim of [batch, sequence, ...]


class Cut(Context, Protocol):
    def cut(self, tokens: Tensor) -> Tensor:
        """Return what this rank has of inputs or labels [batch, seq]."""


class OfRank(Cut):
    """The positions `pieces[number]` of every sequence, of which the ranks of `mesh` have the others."""

    def __init__(self, pieces: Sequence[Sequence[int]], mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.mine = torch.tensor(pieces[mesh.get_local_rank()], device=device)
        self.order = _order(pieces, device)

    def cut(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.mine]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tables = self.at_positions(cos), self.at_positions(sin)
        k, v = self.gathered(torch.stack((apply_rope(k, *tables), v))).unbind()
        return attend(apply_rope(q, *tables), k, v, causal(self.mine, len(self.order)))

    def at_positions(self, table: Tensor) -> Tensor:
        """Return the rows of the RoPE cache for the positions of this rank."""
        return table[self.mine]

    def gathered(self, keys_and_values: Tensor) -> Tensor:
        """[2, batch, positions, ...] of whole sequences, in their order."""
        gathered = funcol.all_gather_tensor_autograd(keys_and_values, _SEQUENCE + 1, self.mesh.get_group())
        return gathered[:, :, self.order]


class OfAllRanks(Cut):
    """All pieces, as the ranks that have one each compute them, one after the other."""

    def __init__(self, pieces: Sequence[Sequence[int]], device: torch.device) -> None:
        self._pieces = [torch.tensor(piece, device=device) for piece in pieces]
        self._order = _order(pieces, device)

    def cut(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens[:, piece] for piece in self._pieces])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ranks = len(self._pieces)
        batch, gathered = along(0, [len(q) // ranks] * ranks), whole(ranks)
        tables = [Given(torch.stack([table[piece] for piece in self._pieces]), STACKED) for table in (cos, sin)]
        q, k = (on_ranks(apply_rope, batch, Given(operand, batch), *tables) for operand in (q, k))
        k, v = (torch.cat(operand.chunk(ranks), _SEQUENCE)[:, self._order] for operand in (k, v))
        masks = torch.stack([causal(piece, len(self._order)) for piece in self._pieces])
        return on_ranks(attend, batch, Given(q, batch), Given(k, gathered), Given(v, gathered), Given(masks, STACKED))


def causal(mine: Tensor, total: int) -> Tensor:
    """Return which of `total` positions a query at each of these may see: [len(mine), total]."""
    return mine[:, None] >= torch.arange(total, device=mine.device)


def _order(pieces: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return where every position of a sequence is in its pieces, one behind the other."""
    return torch.tensor([position for piece in pieces for position in piece], device=device).argsort()


def apply_cp(model: Llama, case: Case, mesh: DeviceMesh, device: torch.device) -> OfRank:
    """Let every block attend with the keys and values of all ranks of the mesh."""
    context = OfRank(positions_of_ranks(case.layout, case.train.seq_len), mesh, device)
    _attend_with(model, context)
    add_up_in_norms(model)
    return context


def stand_for_all(model: Llama, world: World) -> OfAllRanks:
    """Let the model compute what all ranks of context parallelism do that this one stands for."""
    context = OfAllRanks(world.plays.positions, world.device)
    _attend_with(model, context)
    use_pieces(model, len(world.plays.positions))
    return context


def _attend_with(model: Llama, context: Context) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = context
