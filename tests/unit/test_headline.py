"""The three lines of a failure: no digest, tuple, pattern or long number, and a command that the CLI takes."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.catalogue import RULES
from harness.checks.parity import GRADIENTS
from harness.headline import alike, headline_of
from harness.hints import shrink
from harness.verdict import Finding
from tests.builders import WQ
from tests.commands import understood

CASE = "fsdp2-tensorwise-v2048-b16"
RUN = f"fp8-harness run {CASE} --inject fault:gradients_doubled"
VALUES = (
    st.floats(allow_infinity=False).map(repr)
    | st.floats(allow_nan=False).map(lambda number: f"({number!r}, {number!r}, 'ae46337b0a893e15')")
    | st.binary(min_size=8, max_size=8).map(lambda digest: f"rank 0: {digest.hex()}, rank 1: {digest[::-1].hex()}")
    | st.sampled_from(["none", r"an error matching 'self\\.size\\(1\\) (?:is|was) wrong|mat2 is wrong'", "(0,)"])
    | st.integers(0, 10**12).map(str)
)
LONG_NUMBER = re.compile(r"\d\.\d*?[1-9]\d{6}|[1-9]\d*\.\d{6}")
DIGEST = re.compile(r"\b[0-9a-f]{8,}\b")


@st.composite
def findings(draw: st.DrawFn) -> Finding:
    rule = draw(st.sampled_from(list(RULES.values())))
    names = re.findall(r"\{(\w+)", rule.says)
    return rule.finding(
        step=draw(st.none() | st.integers(1, 9)),
        rank=draw(st.none() | st.integers(0, 9)),
        module=draw(st.none() | st.just(WQ)),
        operand=draw(st.sampled_from(["", "weight in forward"])),
        expected=draw(st.none() | VALUES),
        found=draw(st.none() | VALUES),
        values={name: draw(VALUES | st.floats()) for name in names if name not in ("step", "rank", "module")},
    )


@given(findings(), st.integers(1, 8))
@example(RULES["parity/replicas"].finding(expected="one digest", found="rank 0: 1f98e3f66f762eba", offset="(0,)"), 2)
def test_the_lines_have_no_digest_pattern_or_long_number_and_the_command_is_one(finding: Finding, ranks: int) -> None:
    lines = headline_of([finding], command=RUN, ranks=ranks)
    for line in (lines.what, lines.why):
        assert not DIGEST.search(line) and "(?:" not in line and "\n" not in line
        assert not LONG_NUMBER.search(line), line
    assert lines.what.startswith(f"{finding.rule} in {WQ}: " if finding.module else f"{finding.rule}: ")
    assert (lines.next == finding.fix) if lines.is_fix else understood(lines.next)


@pytest.mark.parametrize(
    ("expected", "found", "why"),
    [
        ("95.9664306640625 = 448 / amax 4.668298954849866", "448.0", "expected 95.97 = 448 / amax 4.668, found 448"),
        ("0.8788829492077892", "0.8787", "expected 0.8789, found 0.8787"),
        ("0.8788829492077892", "0.8788829", "expected 0.878883, found 0.878883 (4.9e-08 apart)"),
        ("df29bda8614794d7", "17595f03e51af127", "expected bits A, found bits B"),
        (
            "(1.25, 1.25, 'ae46337b0a893e15')",
            "(1.5, 1.5, '5d0adb24a64023b7')",
            "expected 1.25, bits A, found 1.5, bits B",
        ),
        ("(128, 128)", None, "expected (128, 128)"),
        ("262144000 bytes", "0 bytes", "expected 262,144,000 bytes, found 0 bytes"),
        ("torch 2.13.0 of layers.0.wq", "none", "expected torch 2.13.0 of layers.0.wq, found none"),
        (None, None, ""),
    ],
)
def test_the_numbers_have_as_few_digits_as_tell_them_apart(expected: str, found: str, why: str) -> None:
    assert headline_of([GRADIENTS.finding(expected=expected, found=found)], command=RUN, ranks=1).why == why


@pytest.mark.plugin("bugs")
def test_the_command_narrows_it() -> None:
    nowhere, somewhere = GRADIENTS.finding(), GRADIENTS.finding(module=WQ)
    assert headline_of([nowhere], command=RUN, ranks=2).next == RUN.replace(" run ", " bug shrink ")
    assert headline_of([nowhere], command=RUN, ranks=1).next == headline_of([somewhere], command=RUN, ranks=2).next
    assert headline_of([somewhere], command=RUN, ranks=2).next == f"{RUN} -v"
    assert shrink(f"{RUN} --timeout-s 5") == shrink("") == headline_of([somewhere], command="", ranks=2).next == ""


def test_findings_that_say_the_same_of_other_modules_are_alike() -> None:
    one = GRADIENTS.finding(module="layers.0.wq", step=1, noun="weight")
    others = [replace(one, **change) for change in ({"step": 2}, {"values": {"noun": "input"}}, {"module": None})]
    group = [one, replace(one, module="layers.1.wq"), *others]
    assert alike(group) == group[:2] and alike(others[2:] * 2) == others[2:]
    assert " in 2 modules (layers.*.wq): " in headline_of(group, command=RUN, ranks=1).what
