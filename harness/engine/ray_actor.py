"""One node of a Ray cluster, from inside: the actor that owns its zygotes and ranks. It dies with the driver.

Whatever crosses the cluster is bytes of `messages.py`, or plain strings and numbers.
"""

import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from harness.engine.hardware import Device, NodeCapacity, capacity_here, open_leases
from harness.engine.messages import Message, Share, ShareEvent, ShareOutcome
from harness.engine.node import LocalNode, Reservation, Scratch
from harness.engine.zygote_engine import ZygoteEngine
from harness.errors import HarnessError
from harness.sources import software


class NodeSpec(Message, frozen=True, kw_only=True):
    """What the driver of a run asks of a node. `environ`: variables of the driver that change what ranks compute."""

    program: str
    capacity: NodeCapacity
    logs: str = ""  # keep the folders of jobs here; empty: remove them
    environ: Mapping[str, str] = {}


class NodeFacts(Message, frozen=True, kw_only=True):
    """What a node is: slots and device, versions and sources of its packages."""

    capacity: NodeCapacity
    software: Mapping[str, str]


SPECS = msgspec.msgpack.Decoder(NodeSpec)  # decoders are made before any thread decodes: msgspec would crash
FACTS = msgspec.msgpack.Decoder(NodeFacts)
ANSWERS: msgspec.msgpack.Decoder[Reservation | str] = msgspec.msgpack.Decoder(Reservation | str)
SHARES = msgspec.msgpack.Decoder(Share)
TOLD: msgspec.msgpack.Decoder[ShareEvent | ShareOutcome] = msgspec.msgpack.Decoder(ShareEvent | ShareOutcome)


class NodeActor(LocalNode):
    """The `LocalNode` behind a `RayNode`. Methods are called from several threads."""

    def __init__(self, spec: bytes) -> None:
        asked = SPECS.decode(spec)
        os.environ.update(asked.environ)
        # Without the folders that Ray puts before those of the environment: copies of packages of its own.
        sys.path[:] = [
            path for path in sys.path if not path.endswith(("/ray/thirdparty_files", "/ray/_private/workers"))
        ]
        # Ray decides who has these CPUs or GPUs, so no other process shares their leases.
        self._private = Scratch()
        super().__init__(
            lambda preload: ZygoteEngine(asked.program, preload),
            open_leases(self._private.path, asked.capacity.device, asked.capacity.slots),
            asked.capacity,
            logs=Path(asked.logs) if asked.logs else None,
        )

    def slots(self) -> int:
        return self.capacity.slots

    def hold(self, job_id: str, count: int) -> bytes:
        """`reserve`; returns the `Reservation`, or why there is none."""
        answer: Reservation | str
        try:
            answer = self.reserve(job_id, count)
        except OSError as error:
            answer = str(error)
        except HarnessError as error:
            answer = error.text
        return msgspec.msgpack.encode(answer)

    def stream(self, share: bytes) -> Iterator[bytes]:
        """`run` a `Share`; yields every `ShareEvent` when it happens, and last the `ShareOutcome`."""
        messages: queue.SimpleQueue[ShareEvent | ShareOutcome] = queue.SimpleQueue()
        asked = SHARES.decode(share)

        def work() -> None:
            outcome = ShareOutcome(infra="the actor of the node failed")
            try:
                outcome = self.run(asked, messages.put)
            finally:
                messages.put(outcome)

        threading.Thread(target=work, daemon=True).start()
        while isinstance(message := messages.get(), str):
            yield msgspec.msgpack.encode(message)
        yield msgspec.msgpack.encode(message)

    def close(self) -> None:
        super().close()
        self._private.close()


def node_facts(device: Device) -> bytes:
    return msgspec.msgpack.encode(NodeFacts(capacity=capacity_here(device), software=software()))
