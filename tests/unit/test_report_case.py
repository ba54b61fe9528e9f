"""`show`: one case for a terminal of 60 columns."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from harness.measured import Curve, Measured, Sent
from harness.plural import binary_bytes
from harness.report.case import shown_case, sparkline
from harness.report.sections import text_of
from harness.result import CaseResult
from harness.verdict import NotJudged, Verdict
from tests.builders import a_finding, make_cast_range, make_failure, make_result, run_of

ID = "fsdp2-tp2-tensorwise-tpstyle.fp8-ac.op-v2048-f64"
TABLE = """\
the loss differs by +0.0278 from the golden at step 2, 0.00782 allowed
  step        golden         found    difference     allowed
     1      7.783702      7.782655     -0.001047    0.002910
     2      7.684422      7.712241     +0.027820    0.007820  <"""
SENT = Sent(calls=40, payload_bytes=655360)
MEASURED = Measured(
    curves={
        "case": Curve(losses=(8.0, 7.0, math.nan), grad_norms=(1.0, 2.0, 3.0)),
        "golden": Curve(losses=(8.0, 7.5, 7.0), grad_norms=(1.0, 1.0, 1.0)),
    },
    allowed_loss=(0.01, 0.02),
    loss_distance=0.5,
    parity=1e-15,
    scaled_mm_calls=420,
    wire={"all_gather in float8_e4m3fn along tp": SENT, "all_reduce (max) in float64 along tp": SENT},
    expected_wire={"all_gather in float8_e4m3fn along tp": Sent(calls=41, payload_bytes=655360)},
    saved_bytes=2048,
    expected_saved_bytes=2048,
    fused={"fused_all_gather_scaled_matmul in forward": 4},
    casts=(make_cast_range(2, amax=1.5, scale_min=2.0, scale_max=2.0, flushed=0.125),),
)


def case_text(case: CaseResult, *, width: int = 60) -> str:
    return text_of(shown_case(case), width=width)


def made(**changes: object) -> CaseResult:
    return make_result(ID, Verdict.NUMERIC, **changes)


def full(message: str = TABLE) -> CaseResult:
    return made(
        findings=(a_finding(check="loss_vs_golden", message=message, step=2, rank=0),),
        run=run_of(make_failure(traceback="\n".join(f"line {number}" for number in range(40)))),
        checks=("finite", "parity"),
        not_judged=(NotJudged(check="traffic", reason="the ranks were not asked to record traffic"),),
        measured=MEASURED,
    )


def test_everything_is_told_in_blocks() -> None:
    text = case_text(full())
    titles = [line for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    assert titles == [
        "findings",
        "stacks",
        "curves",
        "numbers",
        "casts to float8 that lose the most",
        "wire, of all ranks and steps",
        "fused",
        "judged by",
        "not judged",
        "run it again",
    ]
    for part in (
        "loss      case    █▁!  8 -> nan",
        "loss      golden  █▅▁  8 -> 7",
        "0.5 nats (allowed 0.02)",
        "saved for backward        2 KiB, as the formula",
        "40 calls, 640 KiB, the formula: 41 calls, 640 KiB",
        "flushed 12.50%, saturated 0.00%, amax 1.5",
        "line 39",
        f"fp8-harness run {ID}",
    ):
        assert part in text, part
    assert "line 20" not in text


def test_a_case_of_which_nothing_was_measured_says_what_is_known() -> None:
    assert case_text(made()) == (
        f"{ID}\n  numeric; 4 ranks, 1.2 s wall, 2.5 s CPU\n\nrun it again\n  fp8-harness run {ID}\n"
    )


@given(st.lists(st.text("ab \n", max_size=200)).map(" ".join))
@example(" a aaaaa  aaaaa aaaaa  aaa")  # like a table, and too wide for one
def test_lines_are_at_most_so_long(message: str) -> None:
    words = " ".join(word[:20] for word in message.split(" "))
    long = [line for line in case_text(full(words)).splitlines() if len(line) > 60]
    assert long == [f"  fp8-harness run {ID}"]


def test_the_rows_of_a_table_stay_rows() -> None:
    lines = case_text(full()).splitlines()
    assert "         2  7.684422  7.712241   +0.027820  0.007820  <" in lines
    assert max(map(len, lines[:-1])) <= 60


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_a_larger_value_never_has_a_lower_bar(values: list[float]) -> None:
    bars = sparkline(values, min(values), max(values))
    assert len(bars) == len(values)
    ordered = [bar for _, bar in sorted(zip(values, bars, strict=True))]
    assert ordered == sorted(bars)


def test_bytes_have_binary_units() -> None:
    assert [binary_bytes(count) for count in (0, 1023, 1024, 3 * 2**20 // 2)] == ["0 B", "1023 B", "1 KiB", "1.5 MiB"]
