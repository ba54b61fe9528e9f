"""The memory of one rank in a step: what is kept is exact in bytes of storages, what backward needs besides a model."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from harness.expect.expert_traffic import sent_rows
from harness.expect.live_memory import expected_live, expected_scalars, gradients
from harness.expect.saved_memory import block_elements, expected_saved
from harness.expect.units import Unit, fsdp_units, ranks_of_unit
from harness.matrix.case import Case, Checkpointing
from harness.matrix.layout import coordinates, expert_coordinates
from harness.matrix.linears import EXPERTS, block_linears, local_features, shard_size
from harness.matrix.recipes import ITEM_BYTES


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank. All but the last three are exact.

    `saved`: by autograd, between forward and backward. `kept`: what is alive besides at that moment, logits and weights
    that FSDP2 does not free. `gradients`: after backward.
    """

    rank: int
    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    saved: int
    kept: int
    probabilities: int  # of the saved bytes, those that backward of the loss frees
    loss: int  # what it adds before: gradients as large
    block: int  # what backward of a block adds: gathered weights, gradients, what it recomputes
    update: int  # what the optimizer adds

    @property
    def state(self) -> int:
        """Bytes that live between steps."""
        return self.parameters + self.buffers + self.optimizer

    @property
    def before_backward(self) -> int:
        """Bytes between forward and backward: exact."""
        return self.state + self.saved + self.kept

    @property
    def certain(self) -> int:
        """The larger of the exact numbers of bytes: between forward and backward, and after backward."""
        return max(self.before_backward, self.state + self.gradients)

    @property
    def peak(self) -> int:
        """The most of the moments that are listed: in backward of the loss, of the last block and of the first, and in
        the update. A lower bound: casts in eager float8, and what else is alive for a moment, are missing.
        """
        last = self.before_backward - self.probabilities + self.block
        updating = self.state + self.gradients + self.update
        return max(self.before_backward + self.loss, last, self.state + self.gradients + self.block, updating)


def memory(case: Case, *, rank: int, saves_attention: bool = True) -> Memory:
    """Return what the formulas say of a rank in step 2, with eager blocks: a compiler chooses what compiled ones save.

    `saves_attention`: `selective_op` saves the output of attention, which is so for every kernel but the CPU's.
    """
    case = replace(case, compile="none", layout=replace(case.layout, async_tp=False))
    units = fsdp_units(case, rank)
    padded, own = _shards(case, units, rank)
    item, last = ITEM_BYTES[case.parameter_dtype], case.model.shape.layers - 1
    saved = sum(expected_saved(case, step=2, rank=rank).values())
    live = expected_live(case, rank=rank, moment="forward")
    scalars = expected_scalars(case, moment="forward") * ITEM_BYTES[case.wide_dtype]
    return Memory(
        rank=rank,
        parameters=(padded if case.uses_fsdp else own) * item,
        buffers=case.train.seq_len * case.model.shape.head_dim * ITEM_BYTES[case.wide_dtype],
        optimizer=case.train.update.states * own * item,
        gradients=sum(gradient.nbytes for gradient in gradients(case, rank)),
        saved=saved + (_attention_bytes(case) if saves_attention else 0),
        kept=scalars
        + sum(storage.nbytes for storage in live if storage.dtype != "uint8"),  # the state of generators is on the host
        probabilities=(probabilities := _probability_bytes(case, rank)),
        loss=_loss_bytes(case, probabilities),
        block=_block_bytes(case, [unit for unit in units if unit.name.startswith(f"layers.{last}")]),
        update=own * item,
    )


def _shards(case: Case, units: tuple[Unit, ...], rank: int) -> tuple[int, int]:
    """Elements of all parameters of a rank: as FSDP2 pads them, and of its own rows."""
    padded = own = 0
    places = coordinates(case.layout, rank) | expert_coordinates(case.layout, rank)
    for unit in units:
        ranks, at = ranks_of_unit(case, unit), places["efsdp" if EXPERTS in unit.name else "dp_shard"]
        padded += sum(weight.shard_elements(ranks) for weight in unit.weights)
        own += sum(shard_size(weight.rows, ranks, at) * weight.columns for weight in unit.weights)
    return padded, own


def _attention_bytes(case: Case) -> int:
    """Output and logsumexp of attention in every block that `selective_op` wraps."""
    if case.checkpointing.mode != "selective_op":
        return 0
    query = local_features(case, "attention.wq")[1] * ITEM_BYTES[case.train.dtype]
    sums = case.model.shape.heads // case.layout.tp * ITEM_BYTES[case.wide_dtype]
    return case.model.shape.layers * case.tokens_per_rank * (query + sums)


def _probability_bytes(case: Case, rank: int) -> int:
    vocab = case.model.padded_vocab_size
    if case.layout.loss_parallel:
        vocab = shard_size(vocab, case.layout.tp, coordinates(case.layout, rank)["tp"])
    return case.tokens_per_rank * vocab * ITEM_BYTES[case.wide_dtype]


def _loss_bytes(case: Case, probabilities: int) -> int:
    """Two gradients of the log-probabilities. Loss parallel has a third one, and indices of every token."""
    if case.layout.tp == 1 or not case.layout.loss_parallel:
        return 2 * probabilities
    return 3 * probabilities + case.tokens_per_rank * ITEM_BYTES["int64"]


def _block_bytes(case: Case, units: Sequence[Unit]) -> int:
    """Weights of two blocks as FSDP2 gathers them, and of one: unreduced gradients, what recomputing saves, gradients.

    The last are those of the feed-forward: two as wide as the model, three as wide as its hidden features. `units`: of
    the last block.
    """
    dtype, last = case.train.dtype, case.model.shape.layers - 1
    ranks_of = [(weight, ranks_of_unit(case, unit)) for unit in units for weight in unit.weights]
    sizes = [(weight, weight.shard_elements(ranks) * ranks) for weight, ranks in ranks_of]
    gathered = sum(size * (1 if weight.gathered_in_float8 else ITEM_BYTES[dtype]) for weight, size in sizes)
    whole = sum(size for _, size in sizes)
    unreduced = whole * (ITEM_BYTES[dtype] + ITEM_BYTES[case.reduce_dtype])
    hidden = next(name for name in block_linears(case.model, last) if name.endswith("w1"))
    widths = 2 * case.model.shape.dim + 3 * local_features(case, hidden)[1]
    elements = case.tokens_per_rank * widths
    if case.model.experts:
        elements += sent_rows(case) * (2 * case.model.shape.dim + 3 * case.model.expert_dim)
    activations = elements * ITEM_BYTES[dtype]
    if case.checkpointing.wraps(last):
        plain = replace(case, checkpointing=Checkpointing())
        activations += sum(
            count * ITEM_BYTES[saved_dtype] for saved_dtype, count in block_elements(plain, last, step=2).items()
        )
    return (2 * gathered + unreduced if case.uses_fsdp else 0) + activations
