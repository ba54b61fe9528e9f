"""`docs/checks.md`: what each check asks, reads and cannot see, its rules, and the planted faults that prove it."""

from collections.abc import Callable, Iterator, Mapping

from harness.checks.catalogue import CHECKS
from harness.checks.check import Check, Stage
from harness.report.sections import Block, Items, Section, Table, markdown
from harness.text import counted, shown

_INTRODUCTION = """\
Every case is judged by these checks. Each asks one question, reads one record of the ranks, and knows rules that a run
may break. A finding carries its rule: records of known faults, signatures and gates read rules and numbers, never
sentences. `fp8-harness explain --checks` prints this page from the declarations in `harness/checks/`.

Findings are sorted by how near they are to the cause:"""


# By the name of a check the planted faults that it finds: the title of each, and the rules that it breaks.
Proofs = Callable[[str], Mapping[str, tuple[str, tuple[str, ...]]]]


def checks_markdown(proofs: Proofs) -> str:
    stages = "\n".join(f"{number}. **{stage_name(stage)}**: {stage.value}." for number, stage in enumerate(Stage, 1))
    sections = tuple(Section(title=check.name, blocks=tuple(_blocks(check, proofs))) for check in CHECKS)
    return markdown([Section(title="Checks", blocks=(_INTRODUCTION, stages, *sections))], level=1, own=True)


def stage_name(stage: Stage) -> str:
    return stage.name.lower().replace("_", " ")


def _blocks(check: Check, proofs: Proofs) -> Iterator[Block]:
    yield check.question
    yield Items(tuple(_facts(check)))
    rows = tuple(
        (rule.name, f"{'' if rule.judged else 'cannot be judged: '}{shown(rule.says)}", stage_name(rule.stage))
        for rule in check.rules
    )
    yield Table(columns=("rule", "message", "stage"), rows=rows, code=(0,))
    if faults := proofs(check.name):
        yield f"Proven by {counted(len(faults), 'planted fault')}:"
        broken = {fault: ", ".join(rule.partition("/")[2] for rule in rules) for fault, (_, rules) in faults.items()}
        yield Items(tuple(f"`{fault}` ({broken[fault]}): {title}" for fault, (title, _) in faults.items()))
    else:
        yield "No planted fault is recorded for it."
    yield check.sight


def _facts(check: Check) -> Iterator[str]:
    reads = [record for record in (check.unasked, *check.records, *check.compiled_records, *check.also_reads) if record]
    names = ", ".join(dict.fromkeys(f"`{record}`" for record in reads))
    yield f"reads: {names or 'losses, gradient norms and counts of every step'}"
    if check.formula is not None:
        yield f"formula: {check.formula} (`harness/expect/`)"
    compared = (
        (check.needs_signature, "the recorded signature"),
        (check.needs_relation, "the partner without neutral options"),
        (check.judges_partner, "the partner, of a compiled case"),
    )
    if any(needed for needed, _ in compared):
        yield f"compares with: {', '.join(words for needed, words in compared if needed)}"
