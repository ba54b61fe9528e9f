"""The choice of a device for every case, which is what `--device auto` means on a machine with GPUs.

A case trains on the GPUs where its ranks fit them and they meet its needs (`matrix/gpu_needs.toml`), else on the
virtual device of the CPU. Pure functions of what the nodes have.
"""

from typing import NamedTuple

import msgspec

from harness.engine.hardware import Capacity, Device
from harness.matrix.case import Case
from harness.matrix.rules import GpuFacts, unmet_needs
from harness.request import Arithmetic, Fabric


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan has on one kind of device."""

    device: Device
    fabric: Fabric
    arithmetic: Arithmetic
    capacity: Capacity
    jobs: int


class Choice(NamedTuple):
    """Where a case trains. `why`: not on a GPU; empty there."""

    device: Device
    arithmetic: Arithmetic
    why: str = ""


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs and the CPU of a run. `may_be_exact`: the arithmetic is chosen too, because none was asked for."""

    gpus: Side
    cpu: Side
    may_be_exact: bool

    def of(self, device: Device) -> Side:
        return self.gpus if device == "cuda" else self.cpu

    def choice(self, case: Case) -> Choice:
        """Where a case trains."""
        one_node = case.train.resume != "none"  # for its checkpoint
        why, exact = obstacle(case, self.gpus, one_node=one_node)
        if not why:
            return Choice("cuda", self.gpus.arithmetic)
        if exact and self.may_be_exact:
            gpus = msgspec.structs.replace(self.gpus, arithmetic="exact")
            why, _ = obstacle(case, gpus, one_node=one_node)
            if not why:
                return Choice("cuda", "exact")
        return Choice("cpu", self.cpu.arithmetic, why)


class Obstacle(NamedTuple):
    """Why a case cannot run on one side; empty where it can. `exact`: the exact matmul would do without."""

    why: str
    exact: bool = False


def obstacle(case: Case, side: Side, *, one_node: bool) -> Obstacle:
    """What stands in the way of a case there, whose ranks need `one_node`."""
    if side.device == "cuda":
        peers = {node.peers for node in side.capacity.nodes}
        facts = GpuFacts(capability=side.capacity.nodes[0].capability, peers=peers.pop() if len(peers) == 1 else False)
        unmet = sorted(unmet_needs(case, facts, exact=side.arithmetic == "exact"), key=lambda need: need.exact)
        if unmet:
            return Obstacle(unmet[0].reason, exact=unmet[0].exact)
    most = side.capacity.largest if one_node else side.capacity.total
    if case.world_size > most:
        return Obstacle("fewer GPUs than ranks" if side.device == "cuda" else "fewer slots than ranks")
    return Obstacle("")
