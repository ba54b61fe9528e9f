"""Which rings the devices here can prove: decisions about facts that were asked for elsewhere. Pure.

`ask_torch` asks for them, in a process that ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from harness.engine.cluster import unleased_cluster
from harness.engine.messages import Job
from harness.errors import HarnessError
from harness.evidence.ring import Ring
from harness.plural import binary_bytes, counted
from harness.trace.device import TorchFacts

PROGRAM = "harness.worker.facts"
_DEADLINE_S = 120.0
FLOAT8_FROM = (8, 9)  # compute capability with float8 matmuls
MOST_DEVICES = {"kernel": 1}  # that a ring uses
LEAST_DEVICES = {"kernel": 1, "proof": 2, "native": 1}
_IN_USE_BYTES = 1 << 30  # what a driver and an idle context hold is less


def ask_torch() -> TorchFacts:
    """What torch says of this machine. HarnessError where the process that asks it fails."""
    with unleased_cluster(PROGRAM, 1) as cluster:
        outcome = cluster.run(Job(job_id="facts", world_size=1, payload=b"", deadline_s=_DEADLINE_S))
    if outcome.status != "ok":
        raise HarnessError(
            f"torch cannot be asked about devices: {outcome.message}", fix='see why `python -c "import torch"` fails.'
        )
    return msgspec.msgpack.Decoder(TorchFacts).decode(outcome.ranks[0].payload or b"")


def obstacle(ring: Ring, facts: TorchFacts, visible: int) -> HarnessError | None:
    """Why the CUDA devices here cannot prove this ring; None where they can. `visible`: how many may be used."""
    return next(_obstacles(ring, facts, visible), None)


def _obstacles(ring: Ring, facts: TorchFacts, visible: int) -> Iterator[HarnessError]:
    where = f"evidence {ring}"
    if not facts.cuda:
        fix = "install a build for CUDA, from https://pytorch.org/get-started/locally/."
        yield HarnessError(f"torch {facts.torch} was built without CUDA.", where=where, fix=fix)
    if facts.error or not facts.devices:
        what = f"torch {facts.torch} for CUDA {facts.cuda} shows no device: {facts.error or 'it counts none'}."
        fix = "compare the version of CUDA with that of the driver, which nvidia-smi shows, and CUDA_VISIBLE_DEVICES."
        yield HarnessError(what, where=where, fix=fix)
    least = LEAST_DEVICES[ring]
    if min(len(facts.devices), visible) < least:
        there = min(len(facts.devices), visible)
        fix = "make more visible by CUDA_VISIBLE_DEVICES, or run the rings that need fewer."
        yield HarnessError(f"it needs {counted(least, 'GPU')}, and {there} can be used.", where=where, fix=fix)
    old = [each for each in facts.devices if each.capability < FLOAT8_FROM]
    if old and ring != "proof":
        named = ", ".join(f"GPU {each.index} ({each.name}, {_dotted(each.capability)})" for each in old)
        what = f"float8 matmuls need compute capability {_dotted(FLOAT8_FROM)}; too old: {named}."
        fix = "leave these out of CUDA_VISIBLE_DEVICES; `evidence proof` multiplies exactly, on older ones too."
        yield HarnessError(what, where=where, fix=fix)
    if ring != "kernel" and not facts.nccl:
        yield HarnessError(f"torch {facts.torch} was built without NCCL.", where=where, fix="install a build with it.")


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def memory_words(facts: TorchFacts) -> tuple[str, ...]:
    """The devices and their memory, in words."""
    return tuple(f"GPU {each.index} {each.name}, {binary_bytes(each.total_bytes)}" for each in facts.devices)


def doubts(facts: TorchFacts, held: Sequence[str]) -> tuple[str, ...]:
    """Caveats about numbers of these devices: memory in use by others, leases of other jobs, mixed GPUs."""
    held_bytes = {each: each.total_bytes - each.free_bytes for each in facts.devices}
    used = [
        f"GPU {each.index}: {binary_bytes(held_bytes[each])} of {binary_bytes(each.total_bytes)} are in use by others; "
        "cases may find too little memory, and their seconds say little"
        for each in facts.devices
        if held_bytes[each] > _IN_USE_BYTES
    ]
    leased = [f"GPU {name} is leased by another job of the harness: cases wait for it" for name in held]
    names = sorted({each.name for each in facts.devices})
    mixed = [f"different GPUs side by side: {', '.join(names)}; the class is that of the first"]
    return (*used, *leased, *(mixed if len(names) > 1 else ()))
