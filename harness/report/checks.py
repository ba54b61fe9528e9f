"""The reference of the checks: what each asks, reads and cannot see, its rules, and the planted faults that prove it.

Collected from the declarations of the checks and from the recorded kill matrix; `docs/checks.md` is this text.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.catalogue import CHECKS
from harness.checks.check import Check
from harness.checks.rule import Rule, Stage
from harness.evidence.kills import Kills
from harness.matrix.faults import all_faults
from harness.plural import counted
from harness.sentence import shown

_HEAD = """\
# Checks

Every case is judged by these checks. Each asks one question, reads one record of the ranks, and knows rules that a run
may break. A finding carries its rule: records of known faults, signatures and gates read rules and numbers, never
sentences. `fp8-harness explain --checks` prints this page, which is made of the declarations in `harness/checks/`.

Findings are told by how near they are to the cause:

"""


def checks_markdown(kills: Kills | None) -> str:
    """The whole reference as Markdown."""
    stages = "".join(f"{number}. **{stage_name(stage)}**: {stage.value}.\n" for number, stage in enumerate(Stage, 1))
    return "\n".join([_HEAD + stages, *(_section(check, kills) for check in CHECKS)])


def stage_name(stage: Stage) -> str:
    """The stage in words."""
    return stage.name.lower().replace("_", " ")


def _section(check: Check, kills: Kills | None) -> str:
    lines = [f"## {check.name}", "", check.question, "", *_facts(check), "", *_rules(check), "", *_proof(check, kills)]
    return "\n".join([*lines, "", check.sight, ""])


def _facts(check: Check) -> Iterator[str]:
    reads = [record for record in (check.record, check.compiled_record, *check.also_reads) if record is not None]
    names = ", ".join(dict.fromkeys(f"`{record}`" for record in reads))
    yield f"- reads: {names or 'losses, gradient norms and counts of every step'}"
    if check.formula is not None:
        yield f"- formula: {check.formula} (`harness/expect/`)"
    compared = [
        *(["the recorded signature"] if check.needs_signature else []),
        *(["the partner without neutral options"] if check.needs_relation else []),
        *(["the partner, of a compiled case"] if check.judges_partner else []),
    ]
    if compared:
        yield f"- compares with: {', '.join(compared)}"


def _rules(check: Check) -> Iterator[str]:
    yield "| rule | it says | stage |"
    yield "|---|---|---|"
    for rule in check.rules:
        yield f"| `{rule.name}` | {_sentence(rule)} | {stage_name(rule.stage)} |"


def _sentence(rule: Rule) -> str:
    lacks = "" if rule.judged else "cannot be judged: "
    return f"{lacks}{shown(rule.says)}".replace("|", "\\|")


def _proof(check: Check, kills: Kills | None) -> Iterator[str]:
    """The planted faults that the check found in the recorded kill matrix, by rule."""
    found = kills.by_check(check.name) if kills is not None else {}
    if not found:
        yield "No planted fault is recorded for it."
        return
    titles = all_faults()
    yield f"Proven by {counted(len(found), 'planted fault')}:"
    yield ""
    for fault, rules in found.items():
        names = ", ".join(rule.partition("/")[2] for rule in rules)
        yield f"- `{fault}` ({names}): {titles[fault].title}"
