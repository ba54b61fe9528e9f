"""Runs checks on ranks and checks what these observed.

Four questions: did it run, is the whole tensor right, are the placements valid, and did it receive no more bytes than
necessary? A problem that a known deviation explains is not a failure; a known deviation without its problem is one.

Known deviations of torch and torchao are those of torch 2.13 to 2.15 and torchao 0.18.0. Every public function below
`_deviation` is one. Its name is the name of the deviation, its docstring the reason, its result whether a check is
affected. The decorator says what the problem looks like: a problem that looks different is not excused.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Literal, NamedTuple

import msgspec

from harness.engine.cluster import Cluster
from harness.engine.messages import Job, JobOutcome
from harness.plugins.conformance.checks import (
    WORLD_SIZE,
    Batch,
    Observation,
    OperatorCheck,
    Output,
    Placements,
    local_shape,
    shard_dim,
)
from harness.plugins.conformance.strategy import (
    LINEAR,
    cheapest_bytes,
    is_local_matmul,
    may_be_partial,
    reduced_dims,
    view_dim,
)
from harness.sources import installed_version, is_among
from harness.studies.surviving import run_surviving
from harness.trace.record import Patch, Record

UNREPORTED = "unreported"  # no report was known at the time of writing
AO_1938 = "https://github.com/pytorch/ao/issues/1938"
CASTS = "https://github.com/pytorch/pytorch/pull/172696"  # reduces before casts to integers only

Predicate = Callable[[OperatorCheck], bool]


class Deviation(NamedTuple):
    """One deviation, and its problem: of one of `kinds`, with `pattern` in what was found.

    With `always`, every affected check must show the problem: one that passes means that the deviation is outdated.
    """

    name: str
    ops: frozenset[str]  # empty: all
    affects: Predicate
    kinds: tuple[str, ...]
    pattern: str
    reason: str
    link: str
    always: bool
    torch: str  # a specifier of the affected versions

    def hits(self, check: OperatorCheck, torch: str) -> bool | None:
        """Return True if a check is affected with this version of torch; None for a pre-release that may have it."""
        affected = (not self.ops or check.op in self.ops) and self.affects(check)
        return affected and is_among(torch, self.torch)

    def explains(self, kind: str, found: str) -> bool:
        return kind in self.kinds and re.search(self.pattern, found) is not None


KNOWN: list[Deviation] = []


def _deviation(
    *kinds: str, ops: str = "", pattern: str, link: str = UNREPORTED, always: bool = True, torch: str = ""
) -> Callable[[Predicate], Predicate]:
    def register(affects: Predicate) -> Predicate:
        name, reason = affects.__name__.replace("_", "-"), " ".join((affects.__doc__ or "").split())
        KNOWN.append(Deviation(name, frozenset(ops.split()), affects, kinds, pattern, reason, link, always, torch))
        return affects

    return register


def deviations_of(check: OperatorCheck, torch: str) -> tuple[Deviation, ...]:
    """Return the deviations that affect a check. What a pre-release may have or not, the check need not show."""
    answers = ((deviation, deviation.hits(check, torch)) for deviation in KNOWN)
    return tuple(
        deviation if hit else deviation._replace(always=False) for deviation, hit in answers if hit is not False
    )


def _is_partial(check: OperatorCheck, *kinds: str) -> bool:
    """Return True if some input is Partial; with `kinds`, of one of these."""
    placements = {placement for operand in check.inputs for placement in operand if placement[0] == "P"}
    return bool(placements & set(kinds) if kinds else placements)


def _shards(check: OperatorCheck, placements: Placements) -> list[tuple[int, int]]:
    """(dim, size of the mesh axis) of every shard."""
    pairs = [(shard_dim(placement), size) for placement, size in zip(placements, check.axes, strict=True)]
    return [(dim, size) for dim, size in pairs if dim is not None]


def _chunks(check: OperatorCheck, placements: Placements) -> dict[int, int]:
    """Return the number of chunks of every sharded dim, over all mesh axes."""
    chunks: dict[int, int] = {}
    for dim, size in _shards(check, placements):
        chunks[dim] = chunks.get(dim, 1) * size
    return chunks


def _short_dims(check: OperatorCheck, placements: Placements, shape: tuple[int, ...]) -> set[int]:
    """Sharded dims with fewer elements than chunks."""
    return {dim for dim, count in _chunks(check, placements).items() if shape[dim] < count}


def _is_uneven(check: OperatorCheck, placements: Placements) -> bool:
    return any(check.shape[dim] % count for dim, count in _chunks(check, placements).items())


def _empty_dims(check: OperatorCheck, placements: Placements) -> set[int]:
    """Return the dims of the first input of which some rank has an empty shard."""
    ranks = product(*(range(size) for size in check.axes))
    shapes = [local_shape(check.shape, placements, check.axes, coordinates) for coordinates in ranks]
    return {dim for shape in shapes for dim, length in enumerate(shape) if not length}


def _is_max_over_dim(check: OperatorCheck) -> bool:
    """True for `max` with a dim, which also returns indices and so gathers the dim."""
    return check.op == "max" and check.dim is not None


@_deviation(
    "raised", pattern=r"(amax|amin|max|aminmax)(\(\))?:? .*(Expected reduction dim|empty dimension)", link=AO_1938
)
def reduction_of_empty_shard(check: OperatorCheck) -> bool:
    """A rank with an empty shard of the reduced dim reduces an empty tensor, which has no identity."""
    empty = _empty_dims(check, check.inputs[0]) & set(reduced_dims(check))
    gathered = _short_dims(check, check.inputs[0], check.shape) if check.op == "aminmax" else set()
    return not _is_max_over_dim(check) and bool(empty - gathered)


@_deviation("bytes", ops="max", pattern="all_gather", torch="<2.14")
def short_dim_is_gathered_for_max(check: OperatorCheck) -> bool:
    short = _short_dims(check, check.inputs[0], check.shape)
    return check.dim is not None and not short <= set(reduced_dims(check))


@_deviation("bytes", "missing", ops="t f8.t", pattern=r"all_gather|aten\.pad\.default", torch=">=2.14")
def short_dim_is_gathered_for_transpose(check: OperatorCheck) -> bool:
    """As short-dim-is-gathered, for a transpose, which torch 2.13 did without communication."""
    return bool(_short_dims(check, check.inputs[0], check.shape))


@_deviation("bytes", ops="aminmax mul div mm", pattern="all_gather")
def short_dim_is_gathered(check: OperatorCheck) -> bool:
    """A dim with fewer elements than ranks counts as not shardable, so a local operator gathers it."""
    shapes = [check.shape, (check.shape[-1], *check.sizes)] if check.op == "mm" else [check.shape] * 2
    return any(_short_dims(check, *input_and_shape) for input_and_shape in zip(check.inputs, shapes, strict=False))


@_deviation("wrong", ops="cast.bfloat16", pattern="elements differ", link=CASTS)
def cast_before_reduction(check: OperatorCheck) -> bool:
    """A cast keeps a partial sum, so every term is rounded before the reduction instead of the sum after it."""
    return check.dtype == "float32" and _is_partial(check, *LINEAR)


@_deviation("raised", ops="cast.e4m3 cast.e5m2", pattern="cannot be reduced", link=CASTS)
def float8_cast_keeps_pending(check: OperatorCheck) -> bool:
    """A cast of a Partial tensor to float8 stays Partial, but no backend can reduce float8."""
    return _is_partial(check)


@_deviation("bytes", ops="clamp clamp.min", pattern="all_reduce|reduce_scatter")
def clamp_reduces_pending_maximum(check: OperatorCheck) -> bool:
    """clamp is monotonic and could keep a partial maximum or minimum, but it is reduced first."""
    return _is_partial(check, "Pmax", "Pmin")


_TWO_REDUCTIONS = r"(all_reduce|reduce_scatter).*(all_reduce|reduce_scatter)"


@_deviation("bytes", ops="to_float8", pattern=_TWO_REDUCTIONS)
def pending_input_reduced_twice(check: OperatorCheck) -> bool:
    """hp_tensor_to_float8_dynamic reduces a Partial input twice: for its amax and for the cast."""
    return _is_partial(check) and not _shards(check, check.inputs[0])


@_deviation("bytes", ops="to_float8", pattern=_TWO_REDUCTIONS, always=False)
def pending_axis_reduced_twice(check: OperatorCheck) -> bool:
    """As pending-input-reduced-twice, with another axis sharded. It need not cost more: DTensor may reduce-scatter."""
    return _is_partial(check) and bool(_shards(check, check.inputs[0]))


@_deviation("raised", "wrong", ops="to_float8", pattern=r"The size of tensor a|elements differ")
def rowwise_scale_not_placed_as_its_tensor(check: OperatorCheck) -> bool:
    """On a 2-D mesh the rowwise scale is reduce-scattered to other placements than the data, and
    hp_tensor_and_scale_to_float8 combines the local tensors of both without a check.
    """
    if check.dim is None:
        return False
    scattered = {(("S0", "S1"), 1), (("Psum", "S0"), 0), (("S1", "Psum"), 0)}
    return (check.inputs[0], check.dim % len(check.shape)) in scattered


@_deviation(
    "raised",
    "wrong",
    "bytes",
    ops="to_float8 tensor_to_scale tensor_to_scale.pow2",
    pattern=r"The size of tensor a|elements differ|reduce_scatter|all_gather.*all_reduce",
    always=False,
)
def rowwise_scale_may_be_scattered(check: OperatorCheck) -> bool:
    """As rowwise-scale-not-placed-as-its-tensor, for other placements or after a gather; depends on the sizes."""
    return check.dim is not None and len(check.axes) > 1


@_deviation("bytes", ops="amax amin max", pattern="all_gather", torch="<2.14")
def amax_gathers_beside_pending_axis(check: OperatorCheck) -> bool:
    """With a reduction pending on one axis, the reduced dim is gathered on the other."""
    sharded = any(dim in reduced_dims(check) for dim, _ in _shards(check, check.inputs[0]))
    return sharded and _is_partial(check) and not _is_max_over_dim(check)


@_deviation("bytes", ops="mul.scale", pattern="all_gather")
def scale_pending_gathers_tensor(check: OperatorCheck) -> bool:
    """A sharded tensor times a partial scalar gathers the tensor instead of reducing the scalar."""
    return check.inputs[1] == ("Psum",) and bool(_shards(check, check.inputs[0]))


@_deviation("bytes", ops="cat", pattern="(all_reduce|reduce_scatter).*all_gather|all_gather.*all_reduce")
def cat_of_pending_and_sharded(check: OperatorCheck) -> bool:
    """cat of a partial sum and a shard of its dim replicates both; gathering the shard would be enough. Since torch
    2.14 it reduce-scatters the sum, which then is gathered with the shard.
    """
    shards = any(shard_dim(placement) == check.dim for placements in check.inputs for placement in placements)
    return shards and _is_partial(check) and check.inputs[0] != check.inputs[1]


@_deviation("raised", ops="view reshape f8.view", pattern="Cannot (flatten|unflatten) unevenly sharded")
def flatten_of_uneven_shard(check: OperatorCheck) -> bool:
    """DTensor refuses to flatten or unflatten an unevenly sharded dim instead of gathering it."""
    fronts = [math.prod(check.sizes[:index]) for index in range(len(check.sizes))]
    return any(
        check.shape[dim] % size
        and math.prod(check.shape[:dim]) in fronts
        and view_dim(check.shape, check.sizes, dim, size) is None
        for dim, size in _shards(check, check.inputs[0])
    )


@_deviation("bytes", ops="redistribute", pattern="all_gather")
def uneven_reshard_pads_both_dims(check: OperatorCheck) -> bool:
    """To change the sharded dim, both dims are padded before the all-gather that replaces an all-to-all."""
    moves = len(check.axes) == 1 and not _is_partial(check) and ("R",) not in (check.inputs[0], check.target)
    return moves and (_is_uneven(check, check.inputs[0]) or _is_uneven(check, check.target))


@_deviation("bytes", pattern="all_gather", always=False)
def dearer_operand_moves(check: OperatorCheck) -> bool:
    """Of two operands, DTensor may move the one that costs more bytes: its cost model includes latency."""
    if len(check.axes) == 1 or len(check.inputs) < 2 or check.inputs[0] == check.inputs[1]:
        return False
    return all(_chunks(check, placements) for placements in check.inputs)


@_deviation("bytes", pattern="all_gather|reduce_scatter", always=False)
def uneven_move_pads(check: OperatorCheck) -> bool:
    """To redistribute uneven shards, every sharded dim is padded to a multiple of its number of ranks."""
    layouts = [*check.inputs, *([check.target] if check.target else [])]
    uneven = any(_is_uneven(check, placements) for placements in layouts)
    moves = check.op in {"redistribute", "mul", "div"} or _is_max_over_dim(check)
    return (moves and (uneven or _is_partial(check))) or (uneven and _is_partial(check))


@_deviation("bytes", ops="redistribute", pattern="all_gather.*all_reduce")
def redistribution_gathers_before_it_reduces(check: OperatorCheck) -> bool:
    """Mesh axes are redistributed from right to left: the shard is gathered first, then all of it is reduced."""
    return check.inputs[0] == ("Psum", "S0") and check.target == ("R", "R")


@_deviation("missing", ops="f8.redistribute", pattern=r"aten\.(constant_pad_nd|new_zeros)\.default", link=AO_1938)
def float8_uneven_redistribution(check: OperatorCheck) -> bool:
    """Float8TrainingTensor does not support padding, so uneven shards cannot be redistributed."""
    return _is_uneven(check, check.inputs[0]) or bool(_empty_dims(check, check.target))


@_deviation(
    "missing",
    ops="f8.split f8.cat f8.mm f8.mm.rowwise",
    pattern=r"aten\.(chunk|contiguous)\.default|with axiswise scaling is not supported",
)
def float8_cannot_be_made_whole(check: OperatorCheck) -> bool:
    """Float8TrainingTensor supports neither chunk nor contiguous, which a gather over any dim but the first needs,
    nor a gather with rowwise scales.
    """
    if check.op in ("f8.split", "f8.cat"):
        return any(dim == check.dim != 0 for dim, _ in _shards(check, check.inputs[0]))
    gathered = [pair for pair in zip(*check.inputs, strict=True) if not is_local_matmul(pair)]
    return any(check.op == "f8.mm.rowwise" or pair != ("S0", "S1") for pair in gathered)


@_deviation("raised", ops="mxfp8.rows.floor", pattern=r"takes from 1 to 2 positional arguments but 3 were given")
def rule_without_scaling_mode(check: OperatorCheck) -> bool:
    """torchao's sharding rule of triton_to_mxfp8_dim0 takes no scaling mode, which DTensor passes where it is given."""
    return True


PROGRAM = "harness.plugins.conformance.worker.checks"

ProblemKind = Literal["missing", "raised", "wrong", "placement", "bytes", "lost"]
Status = Literal["passed", "known", "failed", "unexpected_pass"]
_MISSING = ("sharding strategy", "is not supported", "not implemented")
_SLACK_BYTES = 0.5  # costs are not always integers
# A check takes about 6 ms on two busy cores. A hanging rank must not delay a small run by more than a minute.
_BASE_DEADLINE_S = 45.0
_DEADLINE_PER_CHECK_S = 0.1


class Problem(Record, frozen=True, kw_only=True):
    """One problem, as observed on one rank: the first, if several ranks have it."""

    kind: ProblemKind
    rank: int | None = None
    expected: str
    found: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.kind}: {where}expected {self.expected}, found {self.found}"


class Conclusion(Record, frozen=True, kw_only=True):
    """The result of a check. `deviations` names those that explain its problems, or that no longer occur."""

    check: OperatorCheck
    status: Status
    problems: tuple[Problem, ...]
    deviations: tuple[str, ...]
    wire_bytes: float
    cheapest_bytes: float

    @property
    def good(self) -> bool:
        return self.status in ("passed", "known")


def run_checks(engine: Cluster, checks: Sequence[OperatorCheck], injections: Sequence[Patch] = ()) -> list[Conclusion]:
    """Run and judge all checks, in order. Raises RanksFailed when the ranks fail outside of any check."""
    torch = installed_version("torch") or "0"

    def judge(pending: Sequence[OperatorCheck], outcome: JobOutcome) -> list[Conclusion]:
        ranks = [msgspec.msgpack.decode(rank.payload or b"", type=list[Observation]) for rank in outcome.ranks]
        observed = zip(*ranks, strict=True)
        return [conclude(check, seen, torch=torch) for check, seen in zip(pending, observed, strict=True)]

    return run_surviving(
        engine,
        checks,
        job_of=lambda pending: Job(
            job_id="conformance",
            world_size=WORLD_SIZE,
            payload=msgspec.msgpack.encode(Batch(checks=pending, injections=tuple(injections))),
            deadline_s=_BASE_DEADLINE_S + _DEADLINE_PER_CHECK_S * len(pending),
            one_node=True,
        ),
        judge=judge,
        conclude_lost=conclude_lost,
        where="conformance",
        fix="check the memory of this machine, and --inject.",
    )


def conclude(check: OperatorCheck, observed: Sequence[Observation], *, torch: str) -> Conclusion:
    budget = cheapest_bytes(check)
    moved = max((observation.wire_bytes for observation in observed), default=0.0)
    return _conclusion(check, deviations_of(check, torch), tuple(_problems(check, observed, budget)), moved, budget)


def conclude_lost(check: OperatorCheck, message: str) -> Conclusion:
    """Return the conclusion on a check that brought its ranks down or made them hang."""
    problem = Problem(kind="lost", expected="a result from every rank", found=message)
    return _conclusion(check, (), (problem,), 0.0, cheapest_bytes(check))


def _conclusion(
    check: OperatorCheck, known: Sequence[Deviation], problems: tuple[Problem, ...], moved: float, budget: float
) -> Conclusion:
    explanations = [
        next((deviation for deviation in known if deviation.explains(one.kind, one.found)), None) for one in problems
    ]
    status: Status = "passed"
    shown = [explanation for explanation in explanations if explanation is not None]
    if problems:
        status = "failed" if None in explanations else "known"
    elif outdated := [deviation for deviation in known if deviation.always]:
        status, shown = "unexpected_pass", outdated
    return Conclusion(
        check=check,
        status=status,
        problems=problems,
        deviations=tuple(dict.fromkeys(deviation.name for deviation in shown)),
        wire_bytes=moved,
        cheapest_bytes=budget,
    )


def _problems(check: OperatorCheck, observed: Sequence[Observation], budget: float) -> Iterator[Problem]:
    """Yield all problems of a check; of problems that several ranks share, the first."""
    raised = sorted(
        (observation for observation in observed if observation.error), key=lambda observation: observation.consequence
    )
    if raised:
        first = raised[0]
        yield Problem(
            kind="missing" if any(text in first.error for text in _MISSING) else "raised",
            rank=first.rank,
            expected="the operator to run" if first.phase != "result" else "a result that can be replicated",
            found=first.error,
        )
    else:
        first_of_kind: dict[str, Problem] = {}
        for problem in (problem for observation in observed for problem in _output_problems(check, observation)):
            first_of_kind.setdefault(problem.kind, problem)
        yield from first_of_kind.values()
    finished = all(observation.phase == "result" for observation in observed)
    over = max(observed, key=lambda observation: observation.wire_bytes, default=None)
    if finished and over is not None and over.wire_bytes > budget + _SLACK_BYTES:
        yield Problem(
            kind="bytes",
            rank=over.rank,
            expected=f"at most {budget:g} bytes received",
            found=f"{over.wire_bytes:g} bytes by {', '.join(over.calls)}",
        )


def _output_problems(check: OperatorCheck, seen: Observation) -> Iterator[Problem]:
    if not seen.outputs:
        yield Problem(kind="wrong", rank=seen.rank, expected="a result", found="none")
    for index, output in enumerate(seen.outputs):
        right = f"{list(output.expected_shape)} {output.expected_dtype}"
        found = f"{list(output.shape)} {output.dtype}"
        if output.wrong or found != right:
            yield Problem(
                kind="wrong",
                rank=seen.rank,
                expected=f"{right}, equal to the operator on the full tensor",
                found=f"{found}, {output.wrong} elements differ by up to {output.largest_error:g}: {output.example}",
            )
        for expected, given in _invalid_placements(check, seen, index, output):
            yield Problem(kind="placement", rank=seen.rank, expected=expected, found=given)


def _invalid_placements(
    check: OperatorCheck, seen: Observation, index: int, output: Output
) -> Iterator[tuple[str, str]]:
    placements = output.placements
    if placements is None:
        yield "a DTensor", "a plain tensor"
        return
    if len(placements) != len(check.axes):
        yield f"{len(check.axes)} placements", f"{len(placements)}"
        return
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement) if placement[1:].isdigit() else None
        if dim is not None and dim >= len(output.shape):
            yield f"a shard of one of {len(output.shape)} dims", placement
            return
        if placement[0] not in "RSTP":
            yield "a replicated, sharded or partial placement", placement
        if placement[0] == "P" and not may_be_partial(check, axis, index, placement):
            yield f"no such partial placement on mesh axis {axis}", placement
    written = ".".join(placements)
    if check.target and placements != check.target:
        yield ".".join(check.target), written
    if "T" not in {placement[0] for placement in placements}:  # uneven strided shards follow no simple rule
        local = local_shape(output.shape, placements, check.axes, seen.coordinates)
        if local != output.local_shape:
            yield f"local shape {list(local)} for {written}", f"{list(output.local_shape)}"
