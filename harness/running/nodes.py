"""The nodes of a run that other launchers bring: each of them started the same command with another --node-rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from harness.engine.capacity import Capacity
from harness.engine.joining import Rendezvous, gather, join
from harness.engine.remote import RemoteNode
from harness.errors import HarnessError
from harness.plural import counted
from harness.project import Project
from harness.running.executor import local_node
from harness.running.fingerprint import environment
from harness.running.plan import Plan

_OF_ONE_NODE = ("driver", "cpu", "threads", "limits", "platform", "commit", "changes")  # may differ between nodes


def parse_rendezvous(*, nnodes: int, node_rank: int, endpoint: str | None, timeout_s: float) -> Rendezvous | None:
    """The rendezvous of these options; None for one node. Raises HarnessError if they do not fit together."""
    if nnodes == 1 and node_rank == 0 and endpoint is None:
        return None
    if nnodes == 1 or endpoint is None:
        raise HarnessError(
            "several nodes need a number of nodes and an address where they meet.",
            where="--nnodes, --rdzv-endpoint",
            fix="give both on every node, as --nnodes 2 --node-rank 0 --rdzv-endpoint node-0:29400.",
        )
    if node_rank >= nnodes:
        raise HarnessError(
            f"there is no node {node_rank} of {nnodes}.", where="--node-rank", fix="number the nodes from 0 on."
        )
    rendezvous = Rendezvous(nnodes=nnodes, node_rank=node_rank, endpoint=endpoint, timeout_s=timeout_s)
    _ = rendezvous.address
    return rendezvous


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The plan with what all nodes have, and the nodes besides this one."""

    plan: Plan
    others: tuple[RemoteNode, ...] = ()

    def leave(self, code: int) -> None:
        """Send the exit code of the run to the other nodes, which exit with it."""
        for node in self.others:
            node.leave(code)


@contextmanager
def joined(plan: Plan, project: Project, note: Callable[[str], None]) -> Iterator[Joined]:
    """All nodes of a plan, when they have come; they end with the block. HarnessError when one does not, or differs."""
    if plan.rendezvous is None:
        yield Joined(plan=plan)
        return
    if plan.engine == "ray":
        raise HarnessError("a Ray cluster has nodes of its own.", where="--nnodes", fix="drop it, or --engine ray.")
    note(f"waits at {plan.rendezvous.endpoint} for {counted(plan.rendezvous.nnodes - 1, 'other node')}.")
    others = gather(plan.rendezvous, _facts(plan, project))
    capacity = Capacity(nodes=(*plan.capacity.nodes, *(node.capacity for node in others)))
    have = ", ".join(f"{each.host} with {counted(each.slots, 'slot')}" for each in capacity.nodes)
    note(f"{counted(len(capacity.nodes), 'node')}: {have}.")
    found = Joined(plan=msgspec.structs.replace(plan, capacity=capacity), others=others)
    try:
        yield found
    finally:
        for node in others:
            node.leave()


def serve(plan: Plan, project: Project, note: Callable[[str], None]) -> int:
    """Run what node 0 asks for on this machine, until its run is over; returns the exit code of that run."""
    assert plan.rendezvous is not None
    return join(plan.rendezvous, local_node(plan, project, note), _facts(plan, project))


def _facts(plan: Plan, project: Project) -> Mapping[str, str]:
    """What must be the same on all nodes: packages and their sources, the kind of GPU, engine and rank program."""
    words = environment(plan, project.root).words
    return {name: value for name, value in words.items() if name not in _OF_ONE_NODE}
