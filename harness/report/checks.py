"""Checks and rules for people: `explain RULE`, and `docs/checks.md` with what every rule means and what to do."""

from collections.abc import Iterator

from harness.checks.advice import advice, advice_of
from harness.checks.catalogue import CHECKS, OF_NO_CASE, RULES
from harness.checks.check import Check, Rule, Stage
from harness.errors import HarnessError
from harness.hints import EXPLAIN_CHECK, EXPLAIN_RULE, LIST_INJECTED, LIST_RULES
from harness.matrix.axes import suggestion
from harness.report.sections import Block, Facts, Items, Section, Table, markdown
from harness.text import shown
from harness.verdict import check_of

_INTRODUCTION = f"""\
A check asks one question about a case. A finding names the rule that is broken: `scales/amax` is rule `amax` of check
`scales`. `{EXPLAIN_RULE}` prints one rule, `{EXPLAIN_CHECK}` the messages and limits of a check,
`{LIST_INJECTED}` the injected faults that it finds, `explain --list checks` this page."""
_ORDER = "A report shows first what is nearest to the cause. The order: {stages}."


def checks_markdown() -> str:
    """Return what `docs/checks.md` is."""
    names = f"The checks: {', '.join(check.name for check in CHECKS)}."
    elsewhere = {advice_of(rule) for rule in OF_NO_CASE}
    groups = (
        f"{', '.join(f'`{rule}`' for rule in each.rules)}: {each.meaning} *Causes:* {each.causes} *Do:* {each.action}"
        for each in advice()
        if each not in elsewhere
    )
    order = _ORDER.format(stages=", ".join(map(stage_name, Stage)))
    rules = Section(title="Rules", blocks=(order, Items(tuple(groups))))
    return markdown([Section(title="Checks", blocks=(_INTRODUCTION, names, rules))], level=1, own=True)


def is_explained(word: str) -> bool:
    """Return True for the name of a check, or of what may be its rule."""
    return check_of(word) in map(check_of, RULES) and not word.endswith(".toml")


def explained(word: str) -> Section:
    """Return what a rule or a check is. HarnessError where the check has no such rule."""
    if "/" in word and word not in RULES:
        raise HarnessError(
            f"{check_of(word)} has no such rule.", where=word, fix=suggestion(word, RULES, listed=LIST_RULES)
        )
    if word in RULES:
        return Section(title=word, blocks=tuple(_rule(RULES[word])))
    check = next((check for check in CHECKS if check.name == word), None)
    rows = tuple((rule.name, shown(rule.says)) for rule in RULES.values() if rule.check == word)
    facts = () if check is None else (check.question, Items(tuple(_facts(check))), check.sight)
    return Section(title=word, blocks=(*facts, Table(columns=("rule", "message"), rows=rows)))


def stage_name(stage: Stage) -> str:
    return stage.name.lower().replace("_", " ")


def _rule(rule: Rule) -> Iterator[Block]:
    found = advice_of(rule.name)
    texts = () if found is None else (found.meaning, found.causes, found.action)
    named = zip(("meaning", "usual causes", "what to do"), texts, strict=False)
    stage = f"{stage_name(rule.stage)}: {rule.stage.value}"
    yield Facts((("message", shown(rule.says)), *named, *((("fix", rule.fix),) if rule.fix else ()), ("order", stage)))


def _facts(check: Check) -> Iterator[str]:
    reads = [record for record in (check.unasked, *check.records, *check.compiled_records, *check.also_reads) if record]
    names = ", ".join(dict.fromkeys(f"`{record}`" for record in reads))
    yield f"reads: {names or 'losses, gradient norms and counts of every step'}"
    if check.formula is not None:
        yield f"formula: {check.formula} (`harness/expect/`)"
    compared = (
        (check.needs_profile, "the recorded profile"),
        (check.needs_relation, "the counterpart without neutral options"),
        (check.checks_counterpart, "the counterpart, of a compiled case"),
    )
    if any(needed for needed, _ in compared):
        yield f"compares with: {', '.join(words for needed, words in compared if needed)}"
