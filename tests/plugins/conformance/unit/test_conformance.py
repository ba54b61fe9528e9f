"""What conformance asks, what it may cost, and what its judge makes of answers. No ranks, no torch."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.messages import Job, JobOutcome, RankOutcome
from harness.plugins.conformance import judge
from harness.plugins.conformance.checks import (
    MESHES,
    Batch,
    Observation,
    OperatorCheck,
    Output,
    fixed_checks,
    local_shape,
    select_checks,
)
from harness.plugins.conformance.commands import column, conformance_document, conformance_section
from harness.plugins.conformance.judge import KNOWN, Conclusion, conclude_lost, run_checks
from harness.plugins.conformance.strategy import cheapest_bytes
from harness.report.sections import text_of
from harness.studies.surviving import RanksFailed


def make_check(op: str = "amax", words: str = "S0", mesh: str = "m4", **fields: object) -> OperatorCheck:
    inputs = tuple(tuple(placements.split(".")) for placements in words.split("*"))
    return msgspec.convert({"op": op, "shape": (8, 16), "mesh": mesh, "inputs": inputs, **fields}, OperatorCheck)


def make_output(**fields: object) -> Output:
    shapes = dict.fromkeys(("shape", "local_shape", "expected_shape"), ())
    dtypes = dict.fromkeys(("dtype", "expected_dtype"), "float32")
    values = {"placements": ("Pmax",), **shapes, **dtypes, "wrong": 0, "largest_error": 0.0, "example": ""}
    return msgspec.convert(values | fields, Output)


def seen(*outputs: Output, ranks: int = 4, **fields: object) -> list[Observation]:
    return [
        msgspec.convert({"rank": rank, "coordinates": (rank,), "outputs": outputs, **fields}, Observation)
        for rank in range(ranks)
    ]


def conclude(check: OperatorCheck, observed: list[Observation], *, torch: str = "2.13.0") -> Conclusion:
    return judge.conclude(check, observed, torch=torch)


def kinds(conclusion: Conclusion) -> list[str]:
    return [problem.kind for problem in conclusion.problems]


def test_ids_are_unique_and_every_operator_meets_every_kind_of_placement():
    checks = fixed_checks()
    assert len({check.id for check in checks}) == len(checks) > 1500
    for op in ("abs", "amax", "aminmax", "tensor_to_scale", "transpose"):
        met = {column(check) for check in checks if check.op == op}
        assert met == {"R", "S0", "S1", "uneven", "empty", "Psum", "Pavg", "Pmax", "Pmin", "2-D", "strided"}
    assert {check.mesh for check in checks} == set(MESHES)


def test_selection_by_id():
    ids = [check.id for check in select_checks(["amax.d0k-8x16-f32-m4-S?"])]
    assert ids == ["amax.d0k-8x16-f32-m4-S0", "amax.d0k-8x16-f32-m4-S1"] and select_checks(["nothing"]) == ()


@given(
    words=st.tuples(*[st.sampled_from(["R", "S0", "S1"])] * 2), shape=st.tuples(st.integers(1, 9), st.integers(1, 9))
)
def test_pieces_cover_a_tensor(words: tuple[str, str], shape: tuple[int, int]):
    pieces = [local_shape(shape, words, (2, 2), (row, col)) for row in range(2) for col in range(2)]
    copies = math.prod(2 for word in words if word == "R")
    assert sum(math.prod(piece) for piece in pieces) == copies * math.prod(shape)


COSTS = [
    ("amax", "S0", {}, 0),  # the amax stays pending
    ("amax", "S1", {"dim": -1, "keepdim": True}, 0),
    ("amax", "Psum", {}, 2 * 3 / 4 * 512),  # the sum itself has to be reduced
    ("max", "S0", {"dim": 0}, 3 * 128),  # indices need the whole dim
    ("tensor_to_scale", "S0", {}, 2 * 3 / 4 * 8),  # one float64
    ("tensor_to_scale", "S1", {"dim": -1}, 2 * 3 / 4 * 8 * 8),  # one a row
    ("tensor_to_scale", "S0", {"dim": -1}, 0),
    ("abs", "Psum", {"dtype": "bfloat16"}, 2 * 3 / 4 * 256),
    ("mul", "S0*S0", {}, 0),
    ("mul", "S0*R", {}, 0),
    ("mul", "S0*S1", {}, 3 * 128),
    ("mul.scale", "S0*Pmax", {}, 2 * 3 / 4 * 4),
    ("mm", "S1*S0", {"sizes": (12,)}, 0),
    ("mm", "S0*S0", {"sizes": (12,)}, 3 * 192),
    ("f8.mm", "S0*S0", {"sizes": (12,)}, 3 * 48),  # a byte an element
    ("view", "S1", {"sizes": (128,)}, 3 * 128),
    ("view", "S0", {"sizes": (128,)}, 0),
    ("split", "S0", {"dim": 0, "sizes": (4,)}, 3 * 128),
    ("split", "S0", {"dim": 1, "sizes": (4,)}, 0),
    ("redistribute", "S0", {"target": ("R",)}, 3 * 128),
    ("f8.redistribute", "S0", {"target": ("R",)}, 3 * 32),
    ("redistribute", "Psum", {"target": ("S0",)}, 3 * 128),
    ("redistribute", "Psum", {"target": ("R",)}, 2 * 3 / 4 * 512),
    ("redistribute", "R", {"target": ("S0",)}, 0),
]


def test_the_cheapest_way():
    costs = [(*key, cheapest_bytes(make_check(key[0], key[1], **key[2]))) for *key, _ in COSTS]
    assert costs == COSTS


def test_the_cheapest_way_on_two_axes_and_that_every_fixed_check_has_one():
    assert all(math.isfinite(cheapest_bytes(check)) for check in fixed_checks())
    assert cheapest_bytes(make_check("redistribute", "S0.S0", "m2x2", target=("R", "R"))) == 128 + 256
    assert cheapest_bytes(make_check("redistribute", "R.S0", "m2x2", target=("S0", "S0"))) == 256
    assert cheapest_bytes(make_check("mm", "S0.R*R.S1", "m2x2", sizes=(12,))) == 0
    assert cheapest_bytes(make_check("amax", "Psum.S0", "m2x2")) == 256
    assert cheapest_bytes(make_check("abs", "Psum.R", "m2x2")) == 512  # not less by cutting first


WRONG = [
    ({"wrong": 1, "example": "[] = 1, expected 2"}, "wrong"),
    ({"dtype": "bfloat16"}, "wrong"),
    ({"shape": (1,), "local_shape": (1,)}, "wrong"),
    ({"placements": None}, "placement"),
    ({"placements": ()}, "placement"),
    ({"placements": ("S0",)}, "placement"),  # of no dims
    ({"placements": ("Psum",)}, "placement"),  # an amax leaves no sum
    ({"placements": ("MaskPartial()",)}, "placement"),
]


@pytest.mark.parametrize(("fields", "kind"), WRONG)
def test_what_is_wrong_is_said_and_what_is_right_passes(fields: dict[str, object], kind: str):
    assert conclude(make_check(), seen(make_output())).status == "passed"
    conclusion = conclude(make_check(), seen(make_output(**fields)))
    assert conclusion.status == "failed"
    assert kind in kinds(conclusion)


def test_a_piece_of_another_size_than_its_placement():
    output = make_output(placements=("S0",), shape=(8, 16), local_shape=(8, 16), expected_shape=(8, 16))
    assert kinds(conclude(make_check("abs"), seen(output))) == ["placement"]


def test_a_missing_strategy_and_a_lost_check():
    error = "NotImplementedError: Operator aten.amax.default does not have a sharding strategy registered."
    assert kinds(conclude(make_check(), seen(error=error, phase="operator"))) == ["missing"]
    assert not conclude_lost(make_check(), "hang: no answer").good


def test_the_rank_that_failed_first_is_named():
    followers = seen(error="CollectiveMismatch: rank 1 calls barrier", consequence=True)
    culprit = msgspec.structs.replace(followers[1], error="RuntimeError: mine", consequence=False)
    conclusion = conclude(make_check(), [followers[0], culprit, *followers[2:]])
    assert [(problem.rank, problem.found) for problem in conclusion.problems] == [(1, "RuntimeError: mine")]


def test_a_gather_where_a_reduction_would_do():
    conclusion = conclude(make_check(), seen(make_output(), wire_bytes=384.0, calls=("all_gather of 128 bytes",)))
    assert kinds(conclusion) == ["bytes"]
    assert "at most 0 bytes" in str(conclusion.problems[0])


def test_a_known_deviation_excuses_only_what_it_describes():
    check = make_check("cast.e4m3", "Psum")
    known = seen(error="TypeError: torch.float8_e4m3fn cannot be reduced, as with NCCL", phase="result")
    assert conclude(check, known).status == "known"
    assert conclude(check, seen(error="RuntimeError: boom", phase="result")).status == "failed"
    fixed = make_output(shape=(8, 16), local_shape=(8, 16), expected_shape=(8, 16), placements=("R",))
    conclusion = conclude(check, seen(fixed))
    assert conclusion.status == "unexpected_pass"
    assert conclusion.deviations == ("float8-cast-keeps-pending",)


def test_a_known_deviation_is_that_of_some_versions():
    gathers = seen(
        make_output(shape=(5, 3), local_shape=(5, 3), expected_shape=(5, 3), placements=("R",)),
        wire_bytes=60.0,
        calls=("all_gather of 20 bytes",),
    )
    check = make_check("t", shape=(3, 5))
    verdicts = [conclude(check, gathers, torch=torch).status for torch in ("2.13.0", "2.14.1", "2.15.0a0+git12")]
    assert verdicts == ["failed", "known", "known"]


def test_known_deviations_are_told_apart_and_none_is_left_over():
    names = [deviation.name for deviation in KNOWN]
    assert len(set(names)) == len(names)
    versions = ("2.13.0", "2.15.0")
    hit = {known.name for check in fixed_checks() for known in KNOWN if any(known.hits(check, of) for of in versions)}
    assert hit == set(names)


def test_the_report_and_the_document():
    pending = make_check("cast.e4m3", "Psum")
    known = conclude(pending, seen(error="TypeError: torch.float8_e4m3fn cannot be reduced", phase="result"))
    passed = conclude(make_check(), seen(make_output()))
    document = conformance_document(
        [passed, passed, conclude_lost(make_check(), "hang"), known], software={"torch": "2.13.0"}, seconds=1.25
    )
    assert document.counts == {"passed": 2, "failed": 1, "known": 1}
    lines = [line.split() for line in text_of([conformance_section(document)]).splitlines()]
    assert lines[1:4] == [["operator", "S0", "Psum"], ["amax", "2", "1F", "-"], ["cast.e4m3", "-", "1k"]]
    assert ["1", "float8-cast-keeps-pending:"] in [line[:2] for line in lines]
    assert lines[-1][:2] == ["4", "checks"] and ["lost:"] in [line[:1] for line in lines]
    assert pending.id not in text_of([conformance_section(document)])


class FakeEngine:
    """Answers jobs; a check whose id is in `killers` takes its job down."""

    def __init__(self, killers: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.killers = killers
        self.asked: list[int] = []

    def run(self, job: Job) -> JobOutcome:
        checks = msgspec.msgpack.decode(job.payload, type=Batch).checks
        self.asked.append(len(checks))
        killer = next((check.id for check in checks if check.id in self.killers), "")
        if killer:
            stopped = RankOutcome(rank=0, status="stopped", phase="start", consequence=True)
            ranks = (stopped, RankOutcome(rank=1, status="signaled", phase=killer))
            return JobOutcome(job_id="", status="crash", ranks=ranks, message="rank 1: SIGKILL")
        payloads = (msgspec.msgpack.encode([answer] * len(checks)) for answer in seen(make_output()))
        ranks = tuple(RankOutcome(rank=at, status="returned", payload=payload) for at, payload in enumerate(payloads))
        return JobOutcome(job_id="", status="ok", ranks=ranks)


def test_a_check_that_kills_the_job_is_left_out_of_the_next():
    checks = [make_check(), make_check("max"), make_check("amax", "S1")]
    engine = FakeEngine({checks[1].id})
    conclusions = run_checks(engine, checks)
    assert [conclusion.status for conclusion in conclusions] == ["passed", "failed", "passed"]
    assert kinds(conclusions[1]) == ["lost"]
    assert engine.asked == [3, 2]


def test_many_killers_abort_the_run():
    checks = [make_check(shape=(8, 16 + number)) for number in range(20)]
    conclusions = run_checks(FakeEngine({check.id for check in checks}), checks)
    assert {conclusion.status for conclusion in conclusions} == {"failed"}
    assert "not run: more than 8" in str(conclusions[-1].problems[0])


def test_a_machine_that_cannot_run_is_no_verdict():
    class Broken:
        def run(self, job: Job) -> JobOutcome:
            return JobOutcome(job_id="", status="infra", ranks=(), message="no memory")

    with pytest.raises(RanksFailed, match="the machine ended the ranks: no memory"):
        run_checks(Broken(), [make_check()])
