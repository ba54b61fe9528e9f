"""The sentences of findings: how they are filled in, what people read, and that nothing else reads them."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness import checks
from harness.checks import catalogue
from harness.checks.catalogue import CHECKS, OF_NO_CASE, RULES, by_cause, first_effect, signature_of
from harness.checks.check import Mismatch, Rule, findings_by_rule, merge_ranks
from harness.checks.judge import Judgement, with_known_faults
from harness.matrix.records import Symptom
from harness.text import filled, shown
from harness.verdict import Finding, Value, Verdict
from tests.builders import WQ, make_known, make_trace, run_of

# Filling in


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("on {ranks}", {"ranks": (3,)}, "on rank 3"),
        ("on {ranks}", {"ranks": (16, 0, 1, 2, 16)}, "on ranks 0-2, 16"),
        ("{count:n case}", {"count": 1}, "1 case"),
        ("{count:n case}", {"count": 2}, "2 cases"),
        ("{count:n node is|nodes are} lost", {"count": 1}, "1 node is lost"),
        ("{count:n node is|nodes are} lost", {"count": 0}, "0 nodes are lost"),
        ("{off:.2g} {off:+.3g} {off:.6g}", {"off": 1 / 3}, "0.33 +0.333 0.333333"),
        ("{off:g} {off:.3f} {off:.1e}", {"off": 1 / 3}, "0.333333 0.333 3.3e-01"),
        ("{off:.2g}", {"off": math.nan}, "nan"),
        ("{off}", {"off": 0.1}, "0.1"),
        ("{word:.2g} {word:n case}", {"word": "much"}, "much much"),
        ("{unknown} and {other:.2g}", {}, "{unknown} and {other:.2g}"),
        ("", {}, ""),
    ],
)
def test_a_template_is_filled_in(template: str, values: dict[str, object], text: str) -> None:
    assert filled(template, values) == text


HOSTILE = ("{a.__class__}", "{a[0]}", "{a!r}", "{}", "{0}", "{{a}", "{a:{a}}", "{", "}")


@pytest.mark.parametrize("template", HOSTILE)
def test_what_is_no_place_stays_as_it_is(template: str) -> None:
    assert filled(template, {"b": 1}) == template
    assert filled(template, {"a": 7}).replace("7", "{a}") == template


@pytest.mark.parametrize("spec", [">999999999", "999999999", ".999999999f", "d", "c", "x", "n", "%", ".99g"])
def test_no_other_format_is_followed(spec: str) -> None:
    assert filled(f"{{a:{spec}}}", {"a": 7}) == "7"


PIECES = st.text(max_size=5) | st.sampled_from([*HOSTILE, "{a}", "{a:.2g}", "{a:+.3f}", "{a:n case}", "{a:>9}"])
NUMBERS = st.integers(-9, 9) | st.floats(width=16)


@given(st.lists(PIECES, max_size=6).map("".join), st.text(max_size=5) | NUMBERS.filter(math.isfinite))
def test_any_template_from_a_file_gives_a_text_of_its_length(template: str, value: Value) -> None:
    text = filled(template, {"a": value})
    assert len(text) <= len(template) + template.count("{") * 30


def test_values_are_not_filled_in_again() -> None:
    assert filled("{a}", {"a": "{b}", "b": "secret"}) == "{b}"


def test_a_template_can_be_shown_without_values() -> None:
    assert shown("{missing:n amax reduction} missing along {axis}") == "MISSING missing along AXIS"


# What people read


def wrong_scales() -> Finding:
    wrong = [Mismatch(1, 4, rank, WQ, checks.scales.RULES.amax, "224", "448", "input in forward") for rank in (0, 1)]
    (finding,) = findings_by_rule(wrong, lambda first: f"it is the scale of rank {first.rank}")
    return finding


def merged() -> Finding:
    run = run_of(make_trace(rank=0), make_trace(rank=1))
    (finding,) = merge_ranks(run, lambda trace: [checks.fp8_on.NUMBER.finding(step=1, calls=9, wanted="12")])
    return finding


READ: tuple[Finding, ...] = (
    checks.reported.LOSS.finding(step=2, rank=1, ranks=(0, 1), quantity="loss", value="nan", count=3),
    checks.loss_vs_golden.LOSS.finding(step=3, difference=1.0, allowed=0.25, details="a table"),
    checks.parity.GRADIENTS.finding(
        noun="gradients",
        module="b",
        values={"count": 1, "compared": 2, "distance": 0.01, "allowed": 1e-3, "norm": 4.04, "reference": 4.0},
        notes=("every gradient is 1/2",),
    ),
    checks.packing.LOSS.finding(step=1, values={"distance": 0.02, "allowed": 5e-6}),
    checks.data.SOME.finding(who="ranks 2-3", got=2, wanted=4),
    checks.scales.FLUSHED.finding(
        step=1,
        module="w2",
        operand="input in forward",
        become="become zero",
        values={"found": 0.25, "expected": 0.125, "distance": 0.125, "allowed": 0.006, "count": 1, "compared": 8},
    ),
    checks.model.CALLS.finding(module="up", ours=1, theirs=2, dp=4, count=1),
    *(rule.finding(module="layers.0.attention.wq.weight", step=2) for rule in checks.unshards.check_unshards.rules),
    checks.updates.FORMULA.finding(module="gain", step=2, what="exp_avg", distance=8000.0),
    checks.data.OTHER_STATE.finding(layout="tp2", parts="step of 1 parameter", what="step", module="gain"),
    checks.recompute.STALE_CAST.finding(module="wq", step=2),
    checks.reported.NOT_CLIPPED.finding(max_norm=0.5, reported="it reports 2", norm=1 / 3),
    checks.reported.OTHER_LOSS.finding(),
    checks.fp8_on.NOT_CONVERTED.finding(ranks=(0, 1), count=1, total=2, names="w1"),
    checks.fp8_on.TRAINED.finding(ranks=(1,), refusal="narrow", reason="8 is no multiple of 16"),
    checks.graphs.ROWS.finding(operator="fused", rows=4, total=8),
    merged(),
    checks.recompute.NODES.finding(count=1, node="mul_3"),
    wrong_scales(),
    checks.graph_scales.RULES.number.finding(of=" of weights in forward"),
    checks.traffic.AMAX_MISSING.finding(axis="tp", missing=56),
    checks.traffic.check_traffic.no_record.finding(record="traffic", where="rank 1"),
    checks.memory.OTHER_MODE.finding(mode="none", asked="full", dtype="float32"),
    checks.memory.TOO_MUCH.finding(tensors="float32[4] of cache", when="at the end of the step"),
    checks.memory.GROWS.finding(tensors="float32[4] of cache", when="at the end of the step", settled=2),
    checks.routing.TOP_K.finding(top_k=2),
    checks.metamorphic.EXECUTED.finding(what="scaled matmuls"),
    replace(
        checks.module_replay.LOSS.finding(number="loss", source="logits", distance=0.02, allowed=5e-6), within="in a"
    ),
    checks.metamorphic.NO_PARTNER.finding(who="the partner", why=": x"),
    checks.divergence.OPERAND.finding(what="scale of weight in forward", module=WQ, step=1, rank=0),
    checks.failures.RAISED.finding(ranks=(0, 1), end="raised in step 1: ValueError"),
    catalogue.BROKEN.finding(error="KeyError"),
    catalogue.GONE.finding(fault="rounds", link="https://example.org/1"),
)


@pytest.mark.parametrize("finding", READ, ids=[finding.rule for finding in READ])
def test_a_sentence_has_its_values_and_notes(finding: Finding) -> None:
    values = [str(value) for value in finding.values.values() if not isinstance(value, float)]
    assert "{" not in finding.message and all(word in finding.message for word in [*values, *finding.notes])
    assert finding.message.startswith(finding.first_line) and "\n" not in finding.first_line


def test_a_sentence_of_every_check_is_read_here() -> None:
    assert {finding.check for finding in READ} == {
        *(check.name for check in CHECKS),
        *(
            {rule.check for rule in RULES.values()} - {rule.check for rule in OF_NO_CASE.values()}
        ),  # whose tests read theirs
        "judge",
    }, "add a finding of each check to READ"


def test_what_was_not_verified_is_told_first() -> None:
    finding = replace(merged(), differs="torch 2.16.0 differs from what holds since 2.13.0")
    assert finding.first_line.startswith("torch 2.16.0 differs from what holds since 2.13.0: wrong number of")


# Nothing else reads them

OF_SIZE = ("distance", "allowed")
WORDS = st.text(max_size=12) | st.sampled_from(
    [*HOSTILE, "{ranks}", "{distance:.2g}", *(rule.says for rule in RULES.values())]
)


@st.composite
def _finding(draw: st.DrawFn) -> Finding:
    rule = draw(st.sampled_from(list(RULES.values())))
    names = sorted({*re.findall(r"\{(\w+)", rule.says), *rule.key, *OF_SIZE} - {"step", "rank", "ranks", "module"})
    values: dict[str, Value] = {
        name: draw(NUMBERS if name in OF_SIZE else NUMBERS | st.text(max_size=5)) for name in names
    }
    return rule.finding(
        step=draw(st.none() | st.integers(1, 3)),
        ranks=draw(st.lists(st.integers(0, 3), max_size=3)),
        module=draw(st.sampled_from([None, WQ, "output"])),
        operand=draw(st.sampled_from(["", "weight in forward"])),
        size=draw(st.none() | NUMBERS.map(float)),
        values=values,
    )


@st.composite
def _symptom(draw: st.DrawFn) -> Symptom:
    rule: Rule = draw(st.sampled_from(list(RULES.values())))
    return Symptom(
        rule=draw(st.sampled_from([rule.name, f"{rule.check}/*", "*"])),
        module=draw(st.sampled_from([None, "layers.*"])),
        operand=draw(st.sampled_from([None, "*", "weight in forward"])),
        values={name: draw(st.sampled_from(["*", "1"])) for name in rule.key},
        at_most=draw(st.none() | st.floats(0, 4)),
    )


FINDINGS = st.lists(_finding(), min_size=1, max_size=6)


def _numbered(findings: Sequence[Finding]) -> list[Finding]:
    return [replace(finding, notes=(str(number),)) for number, finding in enumerate(findings)]


@given(FINDINGS, st.data())
def test_another_wording_changes_nothing_that_decides(findings: list[Finding], data: st.DataObject) -> None:
    before = _numbered(findings)
    after = [replace(finding, says=data.draw(WORDS)) for finding in before]
    ordered, reordered = by_cause(before), by_cause(after)
    assert [finding.notes for finding in ordered] == [finding.notes for finding in reordered]
    assert first_effect(ordered) == first_effect(reordered)
    for verdict in (Verdict.NUMERIC, Verdict.INVARIANT, Verdict.KNOWN):
        assert signature_of(verdict, ordered, None) == signature_of(verdict, reordered, None)
    for one, other in zip(before, after, strict=True):
        assert repr(one.excess) == repr(other.excess)  # NaN
        assert (one.judged, one.check) == (other.judged, other.check)


@given(FINDINGS, st.lists(_symptom(), min_size=1, max_size=3), st.data())
def test_another_wording_changes_nothing_that_a_record_explains(
    findings: list[Finding], symptoms: list[Symptom], data: st.DataObject
) -> None:
    before = _numbered(findings)
    after = [replace(finding, says=data.draw(WORDS)) for finding in before]
    for symptom in symptoms:
        assert list(map(symptom.explains, before)) == list(map(symptom.explains, after))
    fault = make_known(requires=tuple(symptoms[:1]), may_cause=tuple(symptoms[1:]))
    assert fault.shows(before) == fault.shows(after)
    assert list(map(fault.explains, before)) == list(map(fault.explains, after))
    ends = [
        with_known_faults(
            Judgement(verdict=Verdict.NUMERIC, findings=tuple(worded)), (fault,), datetime.date(2026, 11, 22)
        )
        for worded in (before, after)
    ]
    assert ends[0].verdict is ends[1].verdict
    assert [finding.rule for finding in ends[0].findings] == [finding.rule for finding in ends[1].findings]
