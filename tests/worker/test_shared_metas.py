"""What DTensor's operators return is computed once for ranks of one fork server, and is what torch computes."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from harness.worker.process import shared_metas
from harness.worker.process.shared_metas import SharedMetas

ATEN = torch.ops.aten
VALUE = [[2, 0], [1, 1], "float8_e4m3fn"]


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    strides = torch.empty(shape, device="meta").stride()
    return SimpleNamespace(tensor_meta=TensorMeta(shape=torch.Size(shape), stride=strides, dtype=dtype))


@pytest.fixture(autouse=True)
def simple_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_metas, "DTensorSpec", SimpleNamespace)


def in_child(action: Any) -> int:
    """The exit code of a forked process, negative for the signal that ended it."""
    process = os.fork()
    if not process:
        try:
            os._exit(int(action() or 0))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_rank_reads_what_another_wrote() -> None:
    shared = SharedMetas()
    assert shared.get("a") is None
    assert in_child(lambda: shared.put("a", VALUE)) == 0
    shared.put("b", [None])
    assert shared.get("a") == VALUE and shared.get("b") == [None]
    assert in_child(lambda: shared.get("b") != [None]) == 0


def test_a_rank_that_is_killed_while_it_writes_stops_no_other() -> None:
    shared = SharedMetas()
    shared.put("before", ())

    def killed() -> None:
        with patch.object(SharedMetas, "_written", lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            shared.put("lost", ())

    assert in_child(killed) == -signal.SIGKILL
    shared.put("after", ())
    assert (shared.get("before"), shared.get("lost"), shared.get("after")) == ([], None, [])


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_metas, "_BYTES", 4096)
    shared = SharedMetas()
    for number in range(400):
        shared.put(f"key {number}", ())
    assert shared.get("key 0") == [] and shared.get("key 399") is None


def test_arguments_that_decide_are_in_the_key() -> None:
    def key(op: Any, *args: Any, **kwargs: Any) -> str:
        return shared_metas._key(SimpleNamespace(op=op, args_schema=args, kwargs_schema=kwargs))

    schemas = [
        key(ATEN.sum.dim_IntList, spec(4, 2), [0], True),
        key(ATEN.sum.dim_IntList, spec(4, 2), [1], True),
        key(ATEN.sum.dim_IntList, spec(4, 2), [0], False),
        key(ATEN.sum.dim_IntList, spec(2, 4), [0], True),
        key(ATEN.sum.dim_IntList, spec(4, 2, dtype=torch.float64), [0], True),
        key(ATEN.sum.dim_IntList, spec(4, 2), [0], True, dtype=torch.float64),
        key(ATEN.mean.dim, spec(4, 2), [0], True),
    ]
    assert len(set(schemas)) == len(schemas) and all(schemas)
    assert key(ATEN.sum.dim_IntList, SimpleNamespace(tensor_meta=None), [0]) == "", "a shape that is not known"
    assert key(ATEN.sum.dim_IntList, object(), [0]) == "", "an argument that has no text of its own"
    assert key(torch.ops.c10d.barrier.default, spec(4)) == "", "an operator that a package may change"


def test_one_rank_computes_and_the_others_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    metas, computed = [TensorMeta(torch.Size((4, 1)), (1, 1), torch.float32)], list[OpSchema]()
    monkeypatch.setattr(
        ShardingPropagator,
        "_propagate_tensor_meta_non_cached",
        lambda _, op_schema: computed.append(op_schema) or metas[0],
    )
    SharedMetas().share()
    propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached
    schema = SimpleNamespace(op=ATEN.sum.dim_IntList, args_schema=(spec(4, 2), [1], True), kwargs_schema={})
    assert [propagate(None, schema) for _ in range(3)] == metas * 3 and computed == [schema]
    with torch._subclasses.FakeTensorMode():
        propagate(None, schema)
    assert len(computed) == 2, "what is traced is not shared"
