"""A rank program that runs the fused operators of `symm_mem` in both variants against a matmul and a collective.

Every rank works on different values, and row scales differ from row to row and rank to rank: a swapped or misread chunk
cannot give the same numbers. A report says for every operator, variant and shape how far the worst row is off.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem
from torch._subclasses import FakeTensorMode

from harness.engine.program import RankContext
from harness.request import Backend
from harness.worker.dispatch_hooks import collectives, fused
from harness.worker.process_group import join
from harness.worker.virtual import device, symm_mem

BATCH, SEQUENCE, INNER, COLUMNS = 3, 8, 32, 16
F8 = torch.float8_e4m3fn


def preload(options: Mapping[str, str]) -> None:
    torch.set_num_threads(1)
    device.install()


def rank_main(context: RankContext) -> bytes:
    backend: Backend = "gloo" if context.payload == b"gloo" else "shared"
    device.install(backend)
    join(context, backend)
    group = dist.group.WORLD.group_name
    report = {}
    check_transport_on_cuda(group)
    for name, compare in COMPARISONS.items():
        for dim in (0, 1):
            report[f"pipelined {name} dim {dim}"] = compare(group, dim)
            with symm_mem.reference():
                report[f"fallback {name} dim {dim}"] = compare(group, dim)
    return json.dumps(report).encode()


def _run(operator: str, given: dict[str, Any]) -> Any:
    """Runs the operator. What it sends by collectives must be what its hook reports on CUDA."""
    sent: list[fused.Sent] = []

    def observe(seen: collectives.Exchange) -> None:
        sent.append(fused.Sent(seen.kind, seen.dtype, seen.elements))

    collectives.observers.append(observe)
    result = symm_mem.run(operator, given)
    collectives.observers.remove(observe)
    if not torch_symm_mem._is_test_mode:
        assert sent == list(fused.sent_by(given)), f"{operator} sends {sent}"
    return result


def check_transport_on_cuda(group: str) -> None:
    """There it is told of, but not where torch's reference runs, whose collectives are told of by themselves."""
    exchanges: list[collectives.Exchange] = []
    collectives.observers.append(exchanges.append)
    with FakeTensorMode():
        given = {"A": torch.empty(4, 8, INNER, device="cuda"), "gather_dim": 0, "group_name": group}
        fused.notify_of_transport(given | {"A": torch.empty(4, 8, INNER)})
        with symm_mem.reference():
            fused.notify_of_transport(given)
        assert exchanges == []
        fused.notify_of_transport(given)
    assert exchanges == [collectives.Exchange("all_gather", "", torch.float32, 4 * 8 * INNER, (0, 1, 2, 3))]
    collectives.observers.clear()


def _random(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def _worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    rows = [tensor.reshape(-1, tensor.shape[-1]).double() for tensor in (found, expected)]
    return float(((rows[0] - rows[1]).norm(dim=-1) / rows[1].norm(dim=-1)).max())


def _gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    gathered: torch.Tensor = funcol.wait_tensor(funcol.all_gather_tensor(tensor, dim, dist.group.WORLD))
    return gathered


def _scatter(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    scattered: torch.Tensor = funcol.wait_tensor(funcol.reduce_scatter_tensor(tensor, "sum", dim, dist.group.WORLD))
    return scattered


def _operands(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [batch, sequence, inner], one factor for every row of it, B column-major; their FP8 values are exact."""
    rows = 1.0 + (torch.arange(BATCH * 2 * SEQUENCE).view(BATCH * 2, SEQUENCE, 1) + 7 * rank) % 23
    a = _random(rank, BATCH * 2, SEQUENCE, INNER).to(F8)
    b = _random(99, COLUMNS, INNER).to(F8).t()
    return a, rows.float(), b


def _gathered_mm(group: str, dim: int) -> float:
    a = _random(dist.get_rank(), BATCH * 2, SEQUENCE, INNER).bfloat16()
    columns = [_random(n, INNER, COLUMNS).bfloat16() for n in (98, 99)]
    given = {"A": a, "Bs": columns, "gather_dim": dim, "group_name": group}
    whole, results = _run("fused_all_gather_matmul", given)
    expected = _gather(a, dim)
    assert torch.equal(whole, expected)
    return max(_worst(product, expected @ b) for product, b in zip(results, columns, strict=True))


def _gathered_scaled(group: str, dim: int, scales: Callable[[torch.Tensor], torch.Tensor]) -> float:
    a, rows, b = _operands(dist.get_rank())
    scale = scales(rows)
    rowwise = scale.numel() > 1
    b_scale = torch.full((1, COLUMNS), 0.5) if rowwise else torch.tensor(0.5)
    given: dict[str, Any] = {"A": a, "Bs": [b], "A_scale": scale, "B_scales": [b_scale], "gather_dim": dim}
    given |= {"group_name": group, "biases": [None], "result_scales": [None]}
    given |= {"out_dtypes": [torch.bfloat16], "use_fast_accum": [False]}
    _, (product,) = _run("fused_all_gather_scaled_matmul", given)
    return _worst(product, _gather(a.float() * scale, dim) @ b.float() * 0.5)


def _scattered_mm(group: str, dim: int) -> float:
    a = _random(dist.get_rank(), BATCH * 4, SEQUENCE, INNER).bfloat16()
    b = _random(99, INNER, COLUMNS).bfloat16()
    given = {"A": a, "B": b, "reduce_op": "sum", "scatter_dim": dim, "group_name": group}
    scattered = _run("fused_matmul_reduce_scatter", given)
    return _worst(scattered, _scatter(a.float() @ b.float(), dim))


def _scattered_scaled(group: str, dim: int, *, rowwise: bool, collapsed: bool) -> float:
    """`collapsed`: A in two dims, as the pass hands it over; otherwise in three."""
    rank = dist.get_rank()
    rows = 1.0 + (torch.arange(4 * SEQUENCE).view(4, SEQUENCE, 1) + 5 * rank) % 13
    a, b = _random(rank, 4, SEQUENCE, INNER).to(F8), _random(99, COLUMNS, INNER).to(F8).t()
    scale = rows.float() if rowwise else torch.tensor(2.0 + rank)
    expected = _scatter((a.float() * scale) @ b.float() * 0.5, dim)
    shape = [4, SEQUENCE, COLUMNS]
    if collapsed:
        a, scale = a.flatten(0, 1), scale.flatten(0, 1) if rowwise else scale
    given: dict[str, Any] = {"A": a, "B": b, "A_scale": scale, "reduce_op": "sum", "group_name": group}
    given |= {"B_scale": torch.full((1, COLUMNS), 0.5) if rowwise else torch.tensor(0.5), "orig_scatter_dim": dim}
    given |= {"scatter_dim_after_maybe_reshape": 0 if collapsed else dim, "output_shape": shape}
    given |= {"out_dtype": torch.bfloat16}
    return _worst(_run("fused_scaled_matmul_reduce_scatter", given), expected)


COMPARISONS: dict[str, Callable[[str, int], float]] = {
    "all-gather, mm": _gathered_mm,
    "all-gather, tensorwise": lambda group, dim: _gathered_scaled(group, dim, lambda rows: torch.tensor(3.0)),
    "all-gather, rowwise": lambda group, dim: _gathered_scaled(group, dim, lambda rows: rows),
    "mm, reduce-scatter": _scattered_mm,
    "tensorwise, reduce-scatter": lambda group, dim: _scattered_scaled(group, dim, rowwise=False, collapsed=False),
    "rowwise, reduce-scatter": lambda group, dim: _scattered_scaled(group, dim, rowwise=True, collapsed=False),
    "collapsed tensorwise, reduce-scatter": lambda group, dim: _scattered_scaled(
        group, dim, rowwise=False, collapsed=True
    ),
    "collapsed rowwise, reduce-scatter": lambda group, dim: _scattered_scaled(group, dim, rowwise=True, collapsed=True),
}
