"""The controller of a run: hands out the slots of its nodes, splits jobs into shares, joins what the nodes report.

One node or many: what is above asks for jobs and knows no host. The slots are those of a run, in memory; `leases.py`
serves other processes.
"""

import contextlib
import itertools
import math
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.hardware import capacity_here
from harness.engine.leases import Leases
from harness.engine.messages import IN_FOLDER, Job, JobOutcome, Share, ShareEvent, ShareOutcome
from harness.engine.node import ALONE, LocalNode, Node, NodeLost
from harness.engine.outcome import conclude, run_with_retries
from harness.engine.processes import StoreProcess
from harness.errors import HarnessError

_RESEND_END_S = 0.1  # between two attempts to end shares that may be about to start
_GRACE_S = 0.3  # after the first failure, ranks of other nodes may still report their own
_ID_IN_FOLDER = 80  # characters; sockets in a job folder have at most 107 for their whole path


class Cluster:
    """Runs jobs on its nodes until closed. Thread-safe. Use as a context manager, or `close` it.

    `store`: where the ranks of a job on several nodes meet. Without one, every job stays on one node. `note` gets a
    line about every job that is tried again.
    """

    def __init__(
        self, nodes: Sequence[Node], store: StoreProcess | None = None, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self._note = note
        self._nodes = {node.name: node for node in nodes}
        assert len(self._nodes) == len(nodes) > 0, "nodes have different names"
        self._has = {node.name: node.capacity for node in nodes}
        self._slots = SlotTable(
            {name: has.slots for name, has in self._has.items()},
            spread=all(has.device == "cpu" for has in self._has.values()),
        )
        self._store = store
        self._numbers = itertools.count(1)
        self._lost: dict[str, str] = {}  # why, by the name of the node

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: Job) -> JobOutcome:
        """Run one job and return its outcome; by then all its processes have ended. Callable from any thread.

        Waits for free slots, and tries again what the machine ended (`outcome.py`). What fails, ranks or nodes, is part
        of the outcome; only a job that is too large for the nodes raises HarnessError, at once.
        """
        return run_with_retries(
            lambda alone: self._run_once(job, alone=alone), closed=lambda: self._slots.closed, note=self._note
        )

    def _run_once(self, job: Job, *, alone: bool) -> JobOutcome:
        nodes: tuple[str, ...] = ()
        job_id = f"{next(self._numbers):04d}-{job.job_id[:_ID_IN_FOLDER]}"
        preload = {**job.preload, ALONE: job_id} if alone else job.preload
        named = msgspec.structs.replace(job, job_id=job_id, preload=preload)
        try:
            with self._slots.taken(job.world_size, one_node=job.one_node or self._store is None) as placement:
                nodes = tuple(sorted(placement)) if len(self._nodes) > 1 else ()
                shares = self._run_placed(named, placement)
        except TableClosed:
            shares = [ShareOutcome(infra="the engine is closed")]
        except OSError as error:
            shares = [ShareOutcome(infra=f"ranks could not be started: {error}")]
        except NodeLost as error:
            shares = [ShareOutcome(infra=str(error))]
        except HarnessError as error:
            if not self._lost:
                raise
            shares = [ShareOutcome(infra=f"{error.what} Lost: {'; '.join(self._lost.values())}")]
        on_gpus = any(has.device == "cuda" for has in self._has.values())
        return msgspec.structs.replace(conclude(job, shares, on_gpus=on_gpus), nodes=nodes)

    def close(self) -> None:
        """Kill all ranks, on all nodes, and close them. Running and later jobs end as `infra`."""
        self._slots.close()

        def close(name: str) -> None:
            with suppress(NodeLost), self._answering(name) as node:
                node.close()

        with ThreadPoolExecutor(len(self._nodes)) as threads:
            list(threads.map(close, self._nodes))
        if self._store is not None:
            self._store.close()

    @contextmanager
    def _answering(self, name: str) -> Iterator[Node]:
        """The node of this name. When it turns out to be lost, it gets no other job."""
        try:
            yield self._nodes[name]
        except NodeLost as error:
            self._lost[name] = str(error)
            self._slots.drop_node(name)
            raise

    def _run_placed(self, job: Job, placement: Mapping[str, int]) -> list[ShareOutcome]:
        """Nodes are asked in the order of their names, so two controllers that share nodes cannot block each other."""
        rendezvous = self._store.address(job.job_id) if self._store and len(placement) > 1 else IN_FOLDER
        shares: dict[str, Share] = {}
        with ExitStack() as held:
            for name in sorted(placement):
                held.callback(self._free, name, job.job_id)
                with self._answering(name) as node:
                    has = node.reserve(job.job_id, placement[name])
                shares[name] = Share(
                    job=job,
                    first_rank=sum(share.count for share in shares.values()),
                    count=placement[name],
                    devices=has.slots if self._has[name].device == "cuda" else (),
                    folder=has.folder,
                    rendezvous=rendezvous,
                )
            if len(shares) > 1:
                return _Parts(job.job_id, shares, self._answering).run()
            with self._answering(name) as node:
                return [node.run(shares[name], lambda _: None)]

    def _free(self, name: str, job_id: str) -> None:
        with suppress(NodeLost), self._answering(name) as node:
            node.free(job_id)


class _Parts:
    """A job on several nodes, while it runs. The first part that fails ends all; ranks exit when all have returned."""

    def __init__(
        self, job_id: str, shares: Mapping[str, Share], answering: Callable[[str], AbstractContextManager[Node]]
    ) -> None:
        self._job_id = job_id
        self._shares = shares
        self._answering = answering
        self._lock = threading.Lock()
        self._returned: set[str] = set()
        self._failed: set[str] = set()  # they end by themselves
        self._end_at_s = math.inf

    def run(self) -> list[ShareOutcome]:
        with ThreadPoolExecutor(len(self._shares)) as threads:
            list(threads.map(self._warm, self._shares))
            running = [threads.submit(self._run_part, name) for name in self._shares]
            try:
                while wait(running, _RESEND_END_S).not_done:
                    if time.monotonic() >= self._end_at_s:
                        self._end_others()  # again, for an `end` that comes before the ranks of a node start is lost
                return [part.result() for part in running]
            except BaseException:  # Ctrl-C: their threads are waited for
                self._end_others()
                raise

    def _warm(self, name: str) -> None:
        """Start the fork server of a node, so that no part spends its deadline waiting for another node's."""
        with suppress(NodeLost), self._answering(name) as node:
            node.warm(self._shares[name].job.preload)

    def _run_part(self, name: str) -> ShareOutcome:
        try:
            with self._answering(name) as node:
                outcome = node.run(self._shares[name], lambda event: self._on_event(name, event))
        except NodeLost as error:
            outcome = ShareOutcome(infra=str(error))
        if outcome.infra or outcome.hung or any(rank.status != "returned" for rank in outcome.ranks):
            self._fail(name)
        return outcome

    def _on_event(self, name: str, event: ShareEvent) -> None:
        if event == "failed":
            self._fail(name)
            return
        with self._lock:
            self._returned.add(name)
            complete = len(self._returned) == len(self._shares)
        if complete:
            self._call_each(self._shares, lambda node: node.release(self._job_id))

    def _fail(self, name: str) -> None:
        with self._lock:
            self._failed.add(name)
            self._end_at_s = min(self._end_at_s, time.monotonic() + _GRACE_S)

    def _end_others(self) -> None:
        with self._lock:
            others = self._shares.keys() - self._failed
        self._call_each(others, lambda node: node.end(self._job_id))

    def _call_each(self, names: Iterable[str], call: Callable[[Node], None]) -> None:
        for name in names:
            with suppress(NodeLost), self._answering(name) as node:
                call(node)


class TableClosed(Exception):
    """The table was closed while a job waited for slots, or before."""


class SlotTable:
    """Free slots by the name of a node. Thread-safe.

    First come, first served: nobody overtakes the job that waits longest, so large jobs do not starve.
    `spread`: use the emptiest node first, for slots that share cores; else the fullest, so that others stay whole.
    """

    def __init__(self, slots: Mapping[str, int], *, spread: bool = False) -> None:
        self._spread = spread
        self._total = dict(slots)
        self._free = dict(slots)
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def taken(self, count: int, *, one_node: bool) -> Iterator[Mapping[str, int]]:
        """Hold `count` slots; yields how many on which node. Waits for them.

        Raises HarnessError at once when the nodes can never hold so many, and TableClosed.
        """
        placement = self._take(count, one_node=one_node)
        try:
            yield placement
        finally:
            with self._changed:
                for name, number in placement.items():
                    if name in self._free:
                        self._free[name] += number
                self._changed.notify_all()

    def drop_node(self, name: str) -> None:
        """Remove a lost node: hand out none of its slots any more."""
        with self._changed:
            self._total.pop(name, None)
            self._free.pop(name, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing any more; whoever waits gets TableClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, count: int, *, one_node: bool) -> Mapping[str, int]:
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while True:
                    if self._closed:
                        raise TableClosed
                    check_fits(self._total, count, one_node=one_node)
                    placement = (
                        place(self._free, self._total, count, spread=self._spread) if self._waiting[0] is me else None
                    )
                    if placement is not None:
                        break
                    self._changed.wait()
                for name, number in placement.items():
                    self._free[name] -= number
                return placement
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()


def check_fits(total: Mapping[str, int], count: int, *, one_node: bool) -> None:
    """Raise HarnessError if nodes with these slots can never run so many ranks at once."""
    largest = max(total.values(), default=0)
    if count <= largest or (not one_node and count <= sum(total.values())):
        return
    where = " on one node" if one_node and len(total) > 1 else ""
    raise HarnessError(
        f"needs {count} slots{where}, but there are only {largest if where else sum(total.values())}.",
        fix="raise --slots, or leave out the cases with more ranks.",
    )


def place(
    free: Mapping[str, int], total: Mapping[str, int], count: int, *, spread: bool = False
) -> dict[str, int] | None:
    """How many slots on which node, None when too few are free: whole on the fullest node that has room, or emptiest.

    What fits on no node is split over as few as possible. Expects a `count` that the nodes can hold.
    """
    if count <= max(total.values()):
        roomy = [name for name in free if free[name] >= count]
        return {(max if spread else min)(roomy, key=lambda name: free[name]): count} if roomy else None
    sums = itertools.accumulate(sorted(total.values(), reverse=True))
    fewest = next(number for number, slots in enumerate(sums, start=1) if slots >= count)
    placement: dict[str, int] = {}
    for name in sorted(free, key=lambda name: -free[name])[:fewest]:
        placement[name] = min(free[name], count - sum(placement.values()))
    return placement if sum(placement.values()) == count else None


@contextlib.contextmanager
def unleased_cluster(program: str, ranks: int, note: Callable[[str], None] = lambda _: None) -> Iterator[Cluster]:
    """Yield a cluster of `ranks` CPU slots of its own, whose ranks run `program`, a dotted module name.

    `note` gets a line about a slow start and about every job that is tried again.
    """
    with tempfile.TemporaryDirectory(prefix="fp8-apart-") as folder:
        slots = Leases(Path(folder), ranks)
        node = LocalNode(lambda options: ForkServerEngine(program, options, note), slots, capacity_here("cpu", ranks))
        with Cluster([node], note=note) as cluster:
            yield cluster
