"""The layout of a case: the mesh, how ranks share the work, and who is a peer of whom.

Ranks are numbered as in torch's DeviceMesh: the last axis varies fastest.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from harness.errors import HarnessError
from harness.matrix.axis import Changes, axis, flag, number
from harness.matrix.model import CaseStruct

Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]
Degree = Annotated[int, Meta(ge=1, le=4096)]

_axis = functools.partial(axis, part="layout", changes=Changes.LAYOUT)


class Mesh(CaseStruct, frozen=True, kw_only=True):
    """The degrees of the axes of a mesh, the outermost first. With `dp_shard` `dp_replicate` is HSDP, alone DDP."""

    pp: Degree = _axis(
        "number of pipeline stages", number("pp{pp}", "pp2", "pipeline parallelism over {0} ranks"), unset=1
    )
    dp_replicate: Degree = _axis(
        "HSDP, DDP: number of replicas",
        flag("single", "one rank"),
        number("fsdp{dp_shard}", "fsdp4", "FSDP2 over {0} ranks"),
        number("hsdp{dp_replicate}x{dp_shard}", "hsdp2x4", "HSDP: {0} replicas of {1} shards each"),
        number("ddp{dp_replicate}", "ddp2", "DDP over {0} ranks"),
        unset=1,
    )
    dp_shard: Degree = _axis("FSDP2 degree: ranks that shard every parameter", everyday=True, unset=1)
    tp: Degree = _axis(
        "tensor-parallel degree", number("tp{tp}", "tp4", "tensor parallelism over {0} ranks"), everyday=True, unset=1
    )

    @property
    def mesh(self) -> dict[str, int]:
        """Return the degree of every axis of the mesh, outermost first: the last varies fastest over ranks."""
        return {name: getattr(self, name) for name in MESH_AXES}

    @property
    def dp(self) -> int:
        """Data-parallel ranks: how many train on different tokens. Those of `cp` share sequences."""
        return ranks_of(self.mesh, DP_AXES)

    @property
    def has_whole_replicas(self) -> bool:
        """Return True if data-parallel ranks have all parameters."""
        return self.dp_replicate > 1 and self.dp_shard == 1

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())


MESH_AXES = Mesh.__struct_fields__
DP_AXES = ("dp_replicate", "dp_shard")  # those whose ranks train on different tokens
SAME_BATCH_AXES = tuple(name for name in MESH_AXES if name not in DP_AXES)
STAGE_AXES = tuple(name for name in MESH_AXES if name != "pp")  # those whose ranks hold the same modules
SHARD_AXES = ("dp_shard", "tp")  # those whose ranks share weights
EXPERT_AXES = ("efsdp", "ep")  # those of the mesh of expert weights alone
SEQUENCE_AXES = ("dp_sequence", "cp")  # of `dp_shard`, as context parallelism divides it
REST = "dp_shard"  # has the ranks that the other axes leave, where its degree is not given
OTHERS = tuple(name for name in MESH_AXES if name != REST)


def ranks_of(degrees: Mapping[str, object], axes: Iterable[str] = MESH_AXES) -> int:
    """How many ranks these axes have together, by their degrees in a mesh or in values of axes; 1 if not given."""
    return math.prod(int(str(degrees.get(name, 1))) for name in axes)


class Layout(Mesh, frozen=True, kw_only=True):
    """How the run is parallelized. `sequence_parallel` and `loss_parallel` are options of TP: at `tp` = 1 they have no
    meaning and keep their defaults.

    `symm_mem` selects the implementation of async TP's fused operators on a CPU: torch's `pipelined` one, chunk by
    chunk, or its unfused reference `fallback`. With `wait_for_embedding` a compiled block gets the finished output of
    the embedding; without it the block gets an AsyncCollectiveTensor, as in torchtitan.

    `reshard_after_forward` is FSDP2's: after forward it frees the weights that it gathered and gathers them again in
    backward, `always` or `never`. With `default` it keeps those of the last unit, with which backward begins.
    """

    replicas: Literal["ddp", "replicate"] = _axis(
        "what adds up gradients of replicas without shards: DistributedDataParallel, or torch's composable replicate",
        number("replicate{dp_replicate}", "replicate2", "composable replicate over {0} ranks", replicas="replicate"),
        needs=("dp_replicate",),
        unset="ddp",
    )
    async_tp: bool = _axis(
        "fuse the collectives of TP with matmuls; needs compile",
        number("atp{tp}", "atp4", "async tensor parallelism over {0} ranks", async_tp=True),
        same_bits="a fused operator multiplies the same rows and sums the same partial results in rank order",
        unset=False,
    )
    symm_mem: Literal["pipelined", "fallback"] = _axis(
        "form of the fused operators of async TP",
        flag("fallback", "async TP in torch's unfused reference form", symm_mem="fallback"),
        needs=("async_tp",),
        unset="pipelined",
    )
    wait_for_embedding: bool = _axis(
        "compiled blocks get the finished embedding",
        flag("nowait", "blocks get an embedding that is still being gathered", wait_for_embedding=False),
        needs=("tp", "compile"),
        unset=True,
    )
    sequence_parallel: bool = _axis(
        "sequence parallelism: TP ranks shard the sequence outside of matmuls",
        flag("nosp", "TP without sequence parallelism", sequence_parallel=False),
        needs=("tp",),
        unset=True,
    )
    loss_parallel: bool = _axis(
        "TP ranks shard the logits and the loss",
        flag("nolp", "TP without loss parallelism", loss_parallel=False),
        needs=("tp",),
        unset=True,
    )
    reshard_after_forward: Literal["default", "always", "never"] = _axis(
        "FSDP2 frees gathered weights after forward (default: except the last unit)",
        flag("reshard.always", "FSDP2 gathers all weights again in backward", reshard_after_forward="always"),
        flag("reshard.never", "FSDP2 keeps gathered weights until backward", reshard_after_forward="never"),
        same_bits="a weight that is gathered again has the same bits",
        unset="default",
    )

    schedule: Schedule = _axis(
        "the order of microbatches in a pipeline",
        flag("gpipe", "all forwards of a pipeline, then all backwards", schedule="gpipe"),
        flag("interleaved", "two stages of a pipeline per rank, 1F1B", schedule="interleaved"),
        flag("zb", "a pipeline that computes gradients of weights in its bubbles", schedule="zero_bubble"),
        needs=("pp",),
        unset="1f1b",
    )
    ep: Degree = _axis(
        "expert-parallel degree: ranks of tp and dp_shard that share the experts of a block",
        number("ep{ep}", "ep2", "expert parallelism over {0} of the ranks that share parameters"),
        needs=("experts",),
        unset=1,
    )

    cp: Degree = _axis(
        "context-parallel degree, carved out of dp_shard",
        number("cp{cp}", "cp2", "context parallelism over {0} of the ranks that share parameters"),
        needs=("dp_shard",),
        unset=1,
    )
    sequence_order: Literal["headtail", "contiguous"] = _axis(
        "positions of a CP rank: headtail balances the causal mask",
        flag("contiguous", "CP ranks have contiguous positions", sequence_order="contiguous"),
        needs=("cp",),
        unset="headtail",
    )

    @property
    def is_ddp(self) -> bool:
        """Return True if DistributedDataParallel has whole replicas of all parameters, and adds up gradients alone."""
        return self.has_whole_replicas and self.replicas == "ddp"

    @property
    def meshes(self) -> tuple[dict[str, int], ...]:
        """Return the mesh, and the same ranks as they share sequences and the weights of experts.

        `cp` ranks of `dp_shard` share sequences, those of `dp_sequence` have different ones. `ep` ranks have different
        experts, those of `efsdp` a part of each.
        """
        outer, dp_shard, tp = {"pp": self.pp, "dp_replicate": self.dp_replicate}, self.dp_shard, self.tp
        return (
            self.mesh,
            {**outer, "dp_sequence": dp_shard // self.cp, "cp": self.cp, "tp": tp},
            {**outer, "efsdp": dp_shard * tp // self.ep, "ep": self.ep},
        )

    @property
    def degrees(self) -> dict[str, int]:
        """Return the degree of every axis of all meshes."""
        return {name: degree for mesh in self.meshes for name, degree in mesh.items()}

    @property
    def shares_of_sequence(self) -> int:
        """Return the number of TP ranks that have different parts of the sequence between blocks."""
        return self.tp if self.sequence_parallel else 1

    @property
    def shares_of_logits(self) -> int:
        """Return the number of TP ranks among which logits and loss are sharded."""
        return self.tp if self.loss_parallel else 1

    @property
    def batches(self) -> int:
        """Return the number of different slices of the global batch: ranks of `cp` share one, and those of `tp`."""
        return max(1, self.dp_replicate * self.dp_shard // self.cp)

    @property
    def dp_in_ep(self) -> int:
        """Return how many data-parallel ranks hold the experts of a block between them: `ep` has all ranks of `tp`."""
        return max(1, self.ep // self.tp)

    def __post_init__(self) -> None:
        if self.tp == 1:
            for name in ("sequence_parallel", "loss_parallel", "wait_for_embedding"):
                msgspec.structs.force_setattr(self, name, True)
        if self.pp == 1:
            msgspec.structs.force_setattr(self, "schedule", "1f1b")
        if self.cp == 1:
            msgspec.structs.force_setattr(self, "sequence_order", "headtail")
        if not self.has_whole_replicas:
            msgspec.structs.force_setattr(self, "replicas", "ddp")
        if not self.async_tp:
            msgspec.structs.force_setattr(self, "symm_mem", "pipelined")


def coordinates(layout: Layout, rank: int, axes: Collection[str] = ()) -> dict[str, int]:
    """Return the coordinate of `rank` on every axis of the mesh that has these (`mesh_with`)."""
    by_axis = {}
    for name, degree in reversed(mesh_with(layout, axes).items()):
        rank, by_axis[name] = divmod(rank, degree)
    return by_axis


def dp_rank(layout: Layout, rank: int) -> int:
    """Which part of the tokens of the global batch `rank` trains on; ranks that differ on other axes alone share one.

    With context parallelism part n is of the slice n // cp of the sequences, and of it the n % cp-th positions.
    """
    mine = coordinates(layout, rank)
    return _position((mine[axis], layout.mesh[axis]) for axis in DP_AXES)


def batch_of(layout: Layout, rank: int) -> int:
    """Return which slice of the sequences of the global batch `rank` trains on."""
    return dp_rank(layout, rank) // layout.cp


def positions(layout: Layout, seq_len: int, part: int) -> tuple[int, ...]:
    """Return the positions of every sequence that a data-parallel rank trains on, in the order in which it has them.

    `headtail` cuts a sequence into twice as many pieces as ranks share it; a rank has the one that is as far from its
    begin as the other is from its end, so that under a causal mask all ranks have as much to do.
    """
    ranks, number = layout.cp, part % layout.cp
    pieces = (number, 2 * ranks - 1 - number)[: pieces_of_rank(layout)]
    length = seq_len // (len(pieces) * ranks)
    return tuple(position for piece in pieces for position in range(piece * length, (piece + 1) * length))


def pieces_of_rank(layout: Layout) -> int:
    return 2 if layout.cp > 1 and layout.sequence_order == "headtail" else 1


def peers(layout: Layout, rank: int, axes: Collection[str]) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` only on these axes, including itself, ascending (`mesh_with`)."""
    return _peers(layout, rank, frozenset(axes))


@functools.lru_cache(maxsize=4096)
def _peers(layout: Layout, rank: int, axes: frozenset[str]) -> tuple[int, ...]:
    """Checks ask for the same ranks once per cast."""
    mesh = mesh_with(layout, axes)
    mine = coordinates(layout, rank, axes)
    ranges = (range(degree) if axis in axes else (mine[axis],) for axis, degree in mesh.items())
    return tuple(_position(zip(place, mesh.values(), strict=True)) for place in itertools.product(*ranges))


def positions_of_ranks(layout: Layout, seq_len: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions on every context-parallel rank; without context parallelism, all positions on one rank."""
    return tuple(positions(layout, seq_len, part) for part in range(layout.cp))


def mesh_with(layout: Layout, axes: Collection[str]) -> dict[str, int]:
    """Return the mesh that alone has one of these axes; the mesh of the layout where none has."""
    own, *others = layout.meshes
    return next((mesh for mesh in others if not (mesh.keys() - own.keys()).isdisjoint(axes)), own)


def left_over(ranks: int, degrees: Mapping[str, object], *, where: str) -> int:
    """Return the degree of the axis `REST` for this number of ranks. HarnessError if the other axes do not divide it.

    `degrees`: of the other axes, by name. `where`: who gave them.
    """
    degree, odd = divmod(ranks, others := ranks_of(degrees, OTHERS))
    if odd:
        what = f"{ranks} ranks are no multiple of {' x '.join(reversed(OTHERS))} = {others}."
        raise HarnessError(what, where=where, fix="give a multiple, or other degrees.")
    return degree


def device_mesh(layout: Layout, *, fsdp: bool) -> dict[str, int]:
    """Return the axes that a run has a mesh of: those of several ranks, and FSDP2's where it is applied to one rank."""
    return {axis: degree for axis, degree in layout.mesh.items() if degree > 1 or (fsdp and axis == REST)}


def _position(place: Iterable[tuple[int, int]]) -> int:
    number = 0
    for coordinate, degree in place:
        number = number * degree + coordinate
    return number


def axis_of_group(layout: Layout, rank: int, ranks: tuple[int, ...]) -> str:
    """Return the mesh axis along which `ranks` are the peers of `rank`; several axes are joined by "+".

    "world" for all ranks of a mesh with several axes, "self" for a group of one, "ranks 0,3" for any other group.
    """
    used = [axis for axis, degree in layout.mesh.items() if degree > 1]
    if len(ranks) == 1:
        return "self"
    for count in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, count):
            if ranks == peers(layout, rank, chosen):
                return "world" if 1 < count == len(used) else "+".join(chosen)
    others = [*(EXPERT_AXES if layout.ep > 1 else ()), *(SEQUENCE_AXES if layout.cp > 1 else ())]
    shared_axis = next((name for name in others if ranks == peers(layout, rank, (name,))), None)
    return shared_axis or f"ranks {','.join(map(str, ranks))}"


def group_name(layout: Layout, axis: str) -> str:
    """Return the name of the groups along an axis, of the other meshes too: another axis may have the same ranks."""
    return axis_of_group(layout, 0, peers(layout, 0, (axis,)))
