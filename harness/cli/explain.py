"""`fp8-harness explain`."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from harness.cli.options import json_option, names_of, print_note, print_or_write, print_sections, project_of
from harness.errors import HarnessError
from harness.evidence.sealed import Damaged, Missing
from harness.expect.expectations import Expectations
from harness.hints import VERIFY_FORMULAS
from harness.internals import Part, State, read_parts, with_needed
from harness.matrix.axes import SCOPE, axis_values, case_from_axes, read_as, read_assignments, shown_value
from harness.matrix.case import Case
from harness.matrix.casefile import read_case_file
from harness.matrix.caseid import WORDS, case_id, family_id, id_words, meaning_of, reference_case
from harness.matrix.dims.tp import fusion_candidates
from harness.matrix.linears import converted_fqns
from harness.matrix.records import matching
from harness.matrix.rules import Rule
from harness.matrix.rules import explain as explain_rules
from harness.matrix.tier import count_cells
from harness.project import Project
from harness.registry import answer, is_llama
from harness.report.checks import checks_markdown, explained, is_explained
from harness.report.run import place_words
from harness.report.sections import Block, Entry, Facts, Items, Section, Table, Verbatim, markdown
from harness.run_options import PARTS, TITLES, PlanOptions, RunOptions, options_of
from harness.running.machine import internals_here
from harness.running.plan import Plan, plan_without_ranks
from harness.running.selection import cases_to_explain, expected_cost

_OPTIONS = (
    "Options with * are stored with a run, and `--lf` repeats them. Other commands that run cases take `--device`, and "
    "these options as `-o backend=gloo`. With pytest, options have the prefix `--fp8-` unless another name is given."
)
_COMPLETION = (
    "Your shell completes commands, options, tiers, case ids, axes and their values, rules, targets, faults and bug "
    "files. Put the line for it into the file that it reads when it starts:"
)
_SHELLS = """\
COMP_WORDBREAKS=${COMP_WORDBREAKS//[:=]/}; eval "$(_FP8_HARNESS_COMPLETE=bash_source fp8-harness)"  # bash
eval "$(_FP8_HARNESS_COMPLETE=zsh_source fp8-harness)"  # zsh
_FP8_HARNESS_COMPLETE=fish_source fp8-harness | source  # fish"""
_EPILOG = """\b
Examples:
  fp8-harness explain tp4-rowwise-v2256-f32
  fp8-harness explain output_layer=true nightly
      the rules for these cells of a tier or file
  fp8-harness explain scales/amax
      the meaning of a rule, its usual causes, what to do
"""
_LISTS = {
    "ids": "all words of case ids, and features out of scope",
    "internals": "private APIs of torch and torchao that ranks use, and why",
    "checks": "every check, and what its rules mean",
    "options": "options of `run`, and what pytest has instead",
    "support": "the support matrix, with the reason of each hole",
    "faults": "faults to inject, by the check that finds them; of a CHECK or class",
}
_LISTED = f"Print {'; '.join(f'{name}: {what}' for name, what in _LISTS.items())}."


_complete = names_of("rules", "axes", "tiers", "cases")


@click.command("explain", epilog=_EPILOG)
@click.argument(
    "words", metavar="[CASE-ID|FILE|RULE|CHECK]... | AXIS=VALUE... [TIER|FILE]", nargs=-1, shell_complete=_complete
)
@click.option("--list", "listed", type=click.Choice(list(_LISTS)), help=_LISTED)
@json_option("the private parts")
def explain(words: tuple[str, ...], *, listed: str | None, json_file: Path | None) -> None:
    """Describe cases and findings, or list the rules for AXIS=VALUE.

    A case: the words of its id, its cost and its rules. RULE and CHECK are named by findings. AXIS=VALUE is searched
    in tier pr, or in the one given.
    """
    if json_file is not None and listed != "internals":
        fix = "give --list internals too."
        raise HarnessError("only the private parts are written as JSON.", where="--json", fix=fix)
    if listed == "ids":
        print_sections(_words_sections())
        return
    if listed == "options":
        click.echo(options_markdown(), nl=False)
        return
    if listed == "internals":
        state = internals_here()
        print_or_write(_internals_sections(state), json_file, _internals_document(state))
        return
    if listed == "checks":
        click.echo(checks_markdown(), nl=False)
        return
    if listed == "faults":
        print_sections(answer("catalogue of faults", where="explain --list faults")(project_of(()), words))
        return
    project = project_of(() if any(map(is_explained, words)) else words)
    if listed == "support":
        from harness.report.support import support_markdown

        click.echo(support_markdown(project), nl=False)
        return
    print_sections(_explained(project, words))
    for sentence in project.replaced_tiers(words):
        print_note(sentence)


def _explained(project: Project, words: Sequence[str]) -> list[Block]:
    """Return the cases, or the rules for AXIS=VALUE."""
    values = [word for word in words if "=" in word]
    tiers = [word for word in words if "=" not in word]
    if not words:
        raise HarnessError("got no case id.", where="explain", fix="give an id, or AXIS=VALUE words, or --list ids.")
    if not values:
        plan = plan_without_ranks(PlanOptions())
        return [section for word in words for section in _word_sections(project, word, plan)]
    if len(tiers) > 1:
        raise HarnessError("values are searched in one tier or file.", where=" ".join(tiers), fix="leave one.")
    return [_values_section(project, values, *tiers)]


def _word_sections(project: Project, word: str, plan: Plan) -> Iterator[Block]:
    """Yield a rule or check of findings, or the cases of an id or file."""
    if is_explained(word):
        yield explained(word)
        return
    for case in cases_to_explain(project, word):
        yield from _case_sections(project, case, plan)


def _words_sections() -> Iterator[Block]:
    """Yield every word of case ids by its place in them, and what no case can have."""
    yield Section(
        blocks=("an id has these words, joined by -, in this order; numbers can be others, such as tp2 for tp4",)
    )
    for part, words in itertools.groupby(WORDS, key=lambda word: word.part):
        yield Section(title=part, blocks=(Facts(tuple((word.example, meaning_of(word.example)) for word in words)),))
    yield Section(
        title="out of scope", blocks=(Items(tuple(f"{feature.name}: {feature.reason}" for feature in SCOPE)),)
    )


def _case_sections(project: Project, case: Case, plan: Plan) -> Iterator[Block]:
    name, default = case_id(case), axis_values(Case())
    yield Section(title=name, blocks=(Facts(tuple((word, meaning_of(word)) for word in id_words(name))),))
    rows = (
        (axis, shown_value(value), "*" if value != default[axis] else "", read_as(axis))
        for axis, value in axis_values(case).items()
    )
    yield Section(title="axes, and where a target reads them (*: not the default)", blocks=(Table(rows=tuple(rows)),))
    facts = {
        **_device(case, plan),
        "world size": str(case.world_size),
        "tokens per rank": str(case.tokens_per_rank),
        "golden family": family_id(case),
        "reference case": case_id(reference_case(case)),
    }
    if is_llama(case.target):
        whole = "pipeline" if case.layout.pp > 1 else "rank"
        facts["scaled matmuls"] = f"{Expectations(case).scaled_mm_calls[1]} per {whole} and step"
        facts["FP8 linears"] = str(len(converted_fqns(case)))
        linears = Section(blocks=(Items(tuple(f"  {fqn}" for fqn in converted_fqns(case))),))
        yield Section(title="run", blocks=(Facts(tuple(facts.items())), linears))
        yield Section(title="cost", blocks=_cost(project, case))
        yield _fusion_section(case)
    else:
        facts["FP8 linears"] = f"all that {case.target} is found to have, but for filter_fqns"
        yield Section(title="run", blocks=(Facts(tuple(facts.items())),))
    yield _unverified_section(project)
    yield Section(title="rules", blocks=tuple(_rules(project, case)))


def _cost(project: Project, case: Case) -> tuple[Block, ...]:
    """What the case will need here: measured where it ran before, estimated elsewhere. Nothing where it is excluded."""
    if explain_rules(case).exclusions:
        return ()
    try:
        expected = expected_cost(project, case)
    except (Damaged, Missing) as error:
        return (f"not estimated: {error.text}",)
    facts = (
        ("ranks", str(case.world_size)),
        ("wall", f"{expected.wall_s:.0f} s on {expected.cpus} CPUs, without waiting for others"),
        ("CPU", f"{expected.case_cpu_s:.1f} s, and {expected.witness_cpu_s:.1f} s for references not kept yet"),
        ("references", ", ".join(expected.references) or "none"),
        ("memory", f"{expected.process_bytes / 1e9:.1f} GB in one process, {expected.all_bytes / 1e9:.1f} GB in all"),
    )
    return (Facts(facts), Items(tuple(expected.basis)))


def _device(case: Case, plan: Plan) -> dict[str, str]:
    """Return where the case would run; nothing on a machine without GPUs."""
    place = plan.of(case).place(case)
    if place is None:
        return {}
    more = f": {place.why}" if place.why else ", with the exact matmul" if place.exact else ""
    return {"device": f"{place_words(place)}{more}"}


def _fusion_section(case: Case) -> Section:
    """Return the collectives that async TP must fuse, and those that it cannot."""
    candidates = fusion_candidates(case)
    fused = sum(candidate.fuses for candidate in candidates)
    rows = (
        ("fused" if candidate.fuses else "plain", candidate.phase, candidate.collective, candidate.purpose)
        for candidate in candidates
    )
    return Section(
        title=f"async TP: {fused} of {len(candidates)} collectives fused with matmuls per rank and step",
        blocks=(Table(rows=tuple(dict.fromkeys(rows))),),
    )


def _unverified_section(project: Project) -> Section:
    """Return the formulas that were not verified with the installed versions: what they disagree with is `changed`."""
    from harness.evidence.verified import doubts, read_verified
    from harness.sources import PACKAGES, installed_versions

    installed = installed_versions(PACKAGES)
    doubted = doubts(read_verified((project.shipped, project.root)), installed)
    versions = " and ".join(f"{name} {installed[name]}" for name in PACKAGES)
    hint = f"A case that differs from them alone is `changed`. `{VERIFY_FORMULAS}` verifies them."
    return Section(title=f"not verified with {versions}: {', '.join(doubted)}", blocks=(hint,) if doubted else ())


def _rules(project: Project, case: Case) -> Iterator[Block]:
    from harness.running.case_judge import known_here

    explanation, faults = explain_rules(case), matching(known_here(project), case)
    yield from (_rule("excluded:", rule) for rule in explanation.exclusions)
    if explanation.refusal is not None:
        yield _rule("must be refused:", explanation.refusal)
        gemms = (f"{gemm.fqn} {gemm.role}: m {gemm.m}, n {gemm.n}, k {gemm.k}" for gemm in explanation.refused_gemms)
        yield Items(tuple(f"  {gemm}" for gemm in gemms))
    for fault in faults:
        shows = "must show" if fault.must_show(case) else "is recognized by"
        lines = [f"{shows} {symptom}" for symptom in fault.requires]
        lines += [f"may cause {symptom}" for symptom in fault.may_cause]
        lines += [f"runs again with {fault.fix}: every check must pass"] if fault.fix is not None else []
        yield Entry(title=f"known issue: {fault.name}: {fault.reason} ({fault.link})", lines=tuple(lines))
    if not (explanation.exclusions or explanation.refusal or faults):
        yield "none: the case must train and pass all checks"


def _rule(title: str, rule: Rule) -> Entry:
    return Entry(title=f"{title} {rule.name}", lines=(rule.reason, rule.source))


def _values_section(project: Project, words: Sequence[str], tier: str = "pr") -> Section:
    values = read_assignments(words)
    case_from_axes(values)  # rejects values that no case can have
    census = count_cells(read_case_file(project.case_file(tier)), values)
    blocks: list[Block] = [
        _rule(f"{title}: {count.cells} by", count.rule)
        for kind, title in (("excluded", "excluded"), ("refused", "must be refused"))
        for count in census.counts
        if count.kind == kind
    ]
    none = "no rule forbids any of them" if census.cells else "the matrix has no such cells"
    return Section(title=f"{' '.join(words)}: {census.cells} cells in {tier}", blocks=tuple(blocks or [none]))


def _internals_sections(state: State) -> Iterator[Block]:
    """Yield every part, the names that it uses, why, and what they are in this environment."""
    parts = read_parts()
    names = sum(len(part.uses) for part in parts.values())
    wrong = sum(map(len, state.gaps.values()))
    subject = f"{wrong} of {names} private names are not" if wrong else f"all {names} private names are"
    versions = " and ".join(f"{library} {version}" for library, version in state.versions.items())
    took = f"a run checks what it uses in {state.milliseconds:.0f} ms"
    yield f"{subject} as declared with {versions}; {took}"
    for name, part in parts.items():
        uses = tuple(_use(part, use, state.gaps[name].get(use)) for use in part.uses)
        yield Section(title=f"{name}: {_loss(name)}", blocks=uses)


def _use(part: Part, use: str, gap: str | None) -> Entry:
    how = part.use(use)
    marks = [f"since {how.since}"] if how.since else []
    marks += ["patched"] if how.patched else ["assigned"] if how.set else []
    wrong = () if gap is None else (f"NOT AS DECLARED: {gap}",)
    return Entry(title=f"{use} ({', '.join(marks)})" if marks else use, lines=(how.why, *wrong))


def _loss(name: str) -> str:
    """Return what is lost without a part; for names that several parts share, what all of them lose."""
    parts = read_parts()
    if parts[name].without:
        return f"without it, {parts[name].without}"
    users = [user for user, part in parts.items() if user != name and part.without and name in with_needed(user)]
    return f"used by {', '.join(users)}"


def _internals_document(state: State) -> dict[str, object]:
    parts = {
        name: {
            "without": part.without,
            "needs": part.needs,
            "files": part.files,
            "uses": {
                use: msgspec.structs.asdict(part.use(use)) | {"problem": state.gaps[name].get(use, "")}
                for use in part.uses
            },
        }
        for name, part in read_parts().items()
    }
    return {"versions": state.versions, "milliseconds": round(state.milliseconds, 1), "parts": parts}


def options_markdown() -> str:
    """Return what `explain --list options` prints."""
    tables = tuple(map(_options_list, TITLES, PARTS))
    shells = Section(title="Completion", blocks=(_COMPLETION, Verbatim(_SHELLS, "sh")))
    return markdown([Section(title="Options of `run`", blocks=(_OPTIONS, *tables, shells))], level=1, own=True)


def _options_list(title: str, part: type[msgspec.Struct]) -> Section:
    lines = []
    for name, option in options_of(part).items():
        words = (option.short, option.flag.split("/")[0] + (f" {option.metavar}" if option.metavar else ""))
        values = f" One of {', '.join(option.choices)}." if option.choices else ""
        default = f" Default: {option.shown_default}." if option.shown_default else ""
        flags = ", ".join(f"`{word}`" for word in words if word)
        repeated = " *" if name in RunOptions.__struct_fields__ else ""
        pytest = option.pytest and f" (pytest: {option.pytest})"
        lines.append(f"{flags}{repeated}{pytest}: {option.help}{values}{default}")
    return Section(title=title, blocks=(Items(tuple(lines)),))
