"""A node of a Ray cluster as the controller of a run uses it: an actor in a bundle of the group of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from harness.engine.messages import Share, ShareEvent, ShareOutcome
from harness.engine.node import NodeLost, Reservation
from harness.engine.ray_actor import ANSWERS, TOLD, NodeActor, NodeSpec, Refused
from harness.engine.ray_group import Group
from harness.errors import HarnessError

_START_S = 120.0  # of an actor, on a busy machine
_CLOSE_S = 15.0  # longer than a zygote needs to end its ranks
_THREADS = 1000  # of an actor: for every job one that runs or waits for slots, and those that end it


class RayNode:
    """One node. Every method raises NodeLost when its actor, or its machine, has died.

    It starts the actor in bundle `index`; `check_started` says whether that worked.
    """

    def __init__(self, ray: Any, group: Group, index: int, spec: NodeSpec) -> None:
        self.name = spec.capacity.host
        self.capacity = spec.capacity
        self._ray = ray
        self._group = group
        self._actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=group.bundles[index].get("CPU", 0),
                num_gpus=group.bundles[index].get("GPU", 0),
                max_concurrency=_THREADS,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group.handle, placement_group_bundle_index=index
                ),
            )
            .remote(msgspec.msgpack.encode(spec))
        )
        self._slots = self._actor.slots.remote()

    def check_started(self) -> None:
        """Wait for the actor. Raises HarnessError where it does not start, or has other devices than were told."""
        try:
            slots = self._ray.get(self._slots, timeout=_START_S)
        except self._ray.exceptions.RayError as error:
            raise not_started(self.name, error) from error
        if slots != self.capacity.slots:
            raise HarnessError(
                f"Ray reserved {self.capacity.slots} GPUs, but its actor sees {slots}.",
                where=f"node {self.name}",
                fix="see CUDA_VISIBLE_DEVICES and nvidia-smi on that node.",
            )

    def reserve(self, job_id: str, count: int) -> Reservation:
        """Hold slots and a folder on the node. Raises OSError where it cannot."""
        answer = ANSWERS.decode(self._ask("reserve", job_id, count))
        if isinstance(answer, Refused):
            raise OSError(f"node {self.name}: {answer.text}")
        return answer.reservation

    def warm(self, preload: Mapping[str, str]) -> None:
        """Start the zygote of these options there."""
        self._ask("warm", dict(preload))

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        """Run a share there, to its end."""
        with self._answering():
            for told in self._actor.run.remote(msgspec.msgpack.encode(share)):
                each = TOLD.decode(self._ray.get(told))
                if isinstance(each, ShareOutcome):
                    return each
                report(each)
        raise NodeLost(f"node {self.name} ended {share.job.job_id} without an outcome")

    def end(self, job_id: str) -> None:
        """End the share of this job at once."""
        self._ask("end", job_id)

    def release(self, job_id: str) -> None:
        """Let the ranks of this job exit."""
        self._ask("release", job_id)

    def free(self, job_id: str) -> None:
        """Give back the slots and the folder of a job."""
        self._ask("free", job_id)

    def close(self) -> None:
        """Kill every rank and every zygote there, then the actor, and leave the group."""
        with suppress(NodeLost):
            self._ask("close", timeout_s=_CLOSE_S)
        self._ray.kill(self._actor)
        self._group.leave()

    def _ask(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        with self._answering():
            return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout_s)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except self._ray.exceptions.RayTaskError:
            raise  # a fault of the harness there, with its traceback
        except self._ray.exceptions.RayError as error:
            raise NodeLost(f"node {self.name} was lost: {ray_message(error)}") from error


def not_started(name: str, error: Exception) -> HarnessError:
    """The HarnessError for a node on which the harness does not start."""
    return HarnessError(
        f"the harness does not start there: {ray_message(error)}",
        where=f"node {name}",
        fix="install on that node what is installed here, or take it out of the cluster.",
    )


def ray_message(error: Exception) -> str:
    """The message of a Ray error on one line: the exception of the other process, or its first sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "Traceback" in str(error) or "ray::" in str(error) else lines[0]
