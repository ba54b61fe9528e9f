"""`fp8-harness explain`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from harness.cli.options import PARTS_BY_TITLE, json_option, root_option, write_json
from harness.errors import HarnessError
from harness.evidence.costs import CostsDamaged
from harness.evidence.formulas import PACKAGES, doubts, read_verified
from harness.evidence.kills import read_kills
from harness.expect.fusion import executed_scaled_mm_calls, fusion_candidates
from harness.hints import VERIFY_FORMULAS
from harness.internals import Part, State, read_parts, with_needed
from harness.matrix.axes import axis_type, axis_values, case_from_axes, known_axis
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, id_words, reference_case
from harness.matrix.known import matching
from harness.matrix.linears import converted_fqns
from harness.matrix.rules import Rule
from harness.matrix.rules import explain as explain_rules
from harness.matrix.scope import SCOPE
from harness.matrix.targets import is_llama
from harness.matrix.words import WORDS, meaning_of
from harness.project import Project, find_project
from harness.report.sections import Section, Table, markdown
from harness.run_options import RunOptions, options_of
from harness.running.case_judge import known_here
from harness.running.cost import expected_cost
from harness.running.machine import internals_here
from harness.running.selection import cases_to_explain
from harness.sources import installed_versions

_OPTIONS = (
    "Those that are repeated are stored with a run; `--lf` and the command that reproduces a case have them again."
)
_EPILOG = """\b
Examples:
  fp8-harness explain tp4-rowwise-v2256-f32
  fp8-harness explain --ids                                every word of case ids, and what is out of scope
  fp8-harness explain tp=4 recipe=tensorwise               the rules for these cells of tier pr
  fp8-harness explain output_layer=true nightly            of another tier or file
  fp8-harness explain --checks                             every check, its rules, and the faults that prove it
  fp8-harness explain --internals                          private parts of torch and torchao, and what they are here
"""


@click.command("explain", epilog=_EPILOG)
@click.argument("words", metavar="[CASE-ID|FILE]... | AXIS=VALUE... [TIER|FILE]", nargs=-1)
@click.option("--ids", is_flag=True, help="List every word that a case id can have, and what is out of scope.")
@click.option("--internals", is_flag=True, help="List every private part of torch and torchao that ranks use, and why.")
@click.option("--checks", is_flag=True, help="Describe every check: question, rules, faults that prove it.")
@click.option("--options", "run_options", is_flag=True, help="Print the options of `run`, and what pytest has instead.")
@json_option("the private parts")
@root_option
def explain(  # noqa: PLR0913  one parameter per option
    words: tuple[str, ...],
    *,
    ids: bool,
    internals: bool,
    checks: bool,
    run_options: bool,
    json_file: Path | None,
    root: str | None,
) -> None:
    """Describe cases, or list the rules for AXIS=VALUE.

    Of a case: the words of its id, its cost and its rules. AXIS=VALUE is searched in tier pr, or in the one given.
    """
    if json_file is not None and not internals:
        raise HarnessError("only the private parts are written as JSON.", where="--json", fix="give --internals too.")
    if ids:
        _print_words()
        return
    if run_options:
        click.echo(options_markdown(), nl=False)
        return
    if internals:
        _print_internals(json_file)
        return
    project = find_project(root)
    if checks:
        _print_checks(project)
        return
    _explain_words(project, words)


def _explain_words(project: Project, words: Sequence[str]) -> None:
    values = [word for word in words if "=" in word]
    if values:
        tiers = [word for word in words if "=" not in word]
        if len(tiers) > 1:
            raise HarnessError("values are searched in one tier or file.", where=" ".join(tiers), fix="leave one.")
        _explain_values(project, values, *tiers)
        return
    if not words:
        raise HarnessError("got no case id.", where="explain", fix="give an id, or AXIS=VALUE words, or --ids.")
    for number, word in enumerate(words):
        click.echo("\n" * bool(number), nl=False)
        for case in cases_to_explain(project, word):
            _explain_case(project, case)


def _print_checks(project: Project) -> None:
    """The reference of the checks, with the faults that the project, or else the harness, recorded."""
    from harness.report.checks import checks_markdown

    kills = read_kills(project.root) or read_kills(project.shipped)
    click.echo(checks_markdown(kills), nl=False)


def _print_words() -> None:
    """Every word of case ids by its place in them, and what no case can have."""
    click.echo("an id has these words, joined by -, in this order; numbers can be others, such as tp2 for tp4")
    for part, words in itertools.groupby(WORDS, key=lambda word: word.part):
        click.echo(f"\n{part}")
        for word in words:
            click.echo(f"  {word.example:<20} {meaning_of(word.example)}")
    click.echo("\nout of scope")
    for each in SCOPE:
        click.echo(f"  {each.name}: {each.reason}")


def _explain_case(project: Project, case: Case) -> None:
    click.echo(case_id(case))
    for token in id_words(case_id(case)):
        click.echo(f"  {token:<18} {meaning_of(token)}")
    click.echo("\naxes")
    default = axis_values(Case())
    for name, value in axis_values(case).items():
        mark = "" if value == default[name] else "  *"
        click.echo(f"  {name:<18} {_text(value)}{mark}")
    click.echo("\nrun")
    click.echo(f"  {'world size':<18} {case.world_size}")
    click.echo(f"  {'tokens per rank':<18} {case.tokens_per_rank}")
    click.echo(f"  {'golden family':<18} {family_id(case)}")
    click.echo(f"  {'reference case':<18} {case_id(reference_case(case))}")
    if is_llama(case.target):
        _print_linears(case)
        _print_cost(project, case)
        _print_fusion_candidates(case)
    else:
        click.echo(f"  {'FP8 linears':<18} all that {case.target} is found to have, but for filter_fqns")
    _print_unverified(project)
    _print_rules(project, case)


def _print_linears(case: Case) -> None:
    fqns = converted_fqns(case)
    click.echo(f"  {'scaled matmuls':<18} {executed_scaled_mm_calls(case)} per rank and step")
    click.echo(f"  {'FP8 linears':<18} {len(fqns)}")
    for fqn in fqns:
        click.echo(f"    {fqn}")


def _print_cost(project: Project, case: Case) -> None:
    """What the case will need here: measured where it ran before, estimated elsewhere."""
    if explain_rules(case).exclusions:
        return
    click.echo("\ncost")
    try:
        expected = expected_cost(project, case)
    except CostsDamaged as error:
        click.echo(f"  not estimated: {error.text}")
        return
    click.echo(f"  {'ranks':<18} {case.world_size}")
    click.echo(f"  {'wall':<18} {expected.wall_s:.0f} s on {expected.cpus} CPUs, without waiting for others")
    click.echo(
        f"  {'CPU':<18} {expected.case_cpu_s:.1f} s, and {expected.witness_cpu_s:.1f} s for references not kept yet"
    )
    process_gb, all_gb = expected.process_bytes / 1e9, expected.all_bytes / 1e9
    click.echo(f"  {'memory':<18} {process_gb:.1f} GB in one process, {all_gb:.1f} GB in all")
    for line in expected.basis:
        click.echo(f"  {line}")


def _print_fusion_candidates(case: Case) -> None:
    """Print the collectives that async TP must fuse, and those that it cannot."""
    found = fusion_candidates(case)
    if not found:
        return
    fused = sum(candidate.fuses for candidate in found)
    click.echo(f"\nasync TP: {fused} of {len(found)} collectives fused with matmuls per rank and step")
    kinds = dict.fromkeys((each.phase, each.collective, each.purpose, each.fuses) for each in found)
    for phase, collective, purpose, fuses in kinds:
        click.echo(f"  {'fused' if fuses else 'plain':<6} {phase:<9} {collective:<15} {purpose}")


def _print_unverified(project: Project) -> None:
    """Print the formulas that were not verified with the installed versions: what they disagree with is `changed`."""
    installed = installed_versions(PACKAGES)
    found = doubts(read_verified((project.shipped, project.root)), installed)
    if found:
        versions = " and ".join(f"{name} {installed[name]}" for name in PACKAGES)
        click.echo(f"\nnot verified with {versions}: {', '.join(found)}")
        click.echo(f"  A case that differs from them alone is `changed`. `{VERIFY_FORMULAS}` verifies them.")


def _print_rules(project: Project, case: Case) -> None:
    click.echo("\nrules")
    found = explain_rules(case)
    _print_each("excluded", found.exclusions)
    if found.refusal is not None:
        _print_each("must be refused", [found.refusal])
        for gemm in found.refused_gemms:
            click.echo(f"    {gemm.fqn} {gemm.role}: m {gemm.m}, n {gemm.n}, k {gemm.k}")
    faults = matching(known_here(project), case)
    for fault in faults:
        click.echo(f"  known fault: {fault.name}: {fault.reason} ({fault.link})")
        shows = "must show" if fault.must_show(case) else "is recognized by"
        for title, symptoms in ((shows, fault.requires), ("may cause", fault.may_cause)):
            for symptom in symptoms:
                click.echo(f"    {title} {symptom}")
        if fault.fix is not None:
            click.echo(f"    runs again with {fault.fix}: every check must pass")
    if not (found.exclusions or found.refusal or faults):
        click.echo("  none: the case must train and pass all checks")


def _print_each(title: str, rules: Iterable[Rule]) -> None:
    for rule in rules:
        click.echo(f"  {title}: {rule.name}\n    {rule.reason}\n    {rule.source}")


def _explain_values(project: Project, words: Sequence[str], tier: str = "pr") -> None:
    from harness.matrix.casefile import read_case_file
    from harness.matrix.coverage import count_cells

    values = _parse(words)
    census = count_cells(read_case_file(project.case_file(tier)), values)
    click.echo(f"{' '.join(words)}: {census.cells} cells in {tier}")
    titles = {"excluded": "excluded", "refused": "must be refused"}
    for kind, title in titles.items():
        for count in census.counts:
            if count.kind == kind:
                click.echo(f"  {title}: {count.cells} by {count.rule.name}\n    {count.rule.reason}")
                click.echo(f"    {count.rule.source}")
    if not census.counts:
        click.echo("  no rule forbids any of them" if census.cells else "  the matrix has no such cells")


def _parse(words: Sequence[str]) -> dict[str, object]:
    """The values of `axis=value` words, converted to the types of the axes."""
    values: dict[str, object] = {}
    for word in words:
        name, _, text = word.partition("=")
        values[known_axis(name)] = _value(known_axis(name), text)
    case_from_axes(values)  # rejects values that no case can have
    return values


def _value(name: str, text: str) -> object:
    kind = axis_type(name)
    if kind is bool and text in ("true", "false"):
        return text == "true"
    if kind is tuple:
        return tuple(part for part in text.split("+") if part)
    try:
        return int(text) if kind is int else float(text) if kind is float else text
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise HarnessError(
            f"'{text}' is not {expected}.", where=f"{name}={text}", fix=f"write {name}=NUMBER."
        ) from None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _print_internals(json_file: Path | None) -> None:
    """Print every part, the names that it uses, why, and what they are in this environment."""
    state = internals_here()
    if json_file is not None:
        write_json(json_file, _internals_document(state))
        return
    parts = read_parts()
    names = sum(len(part.uses) for part in parts.values())
    wrong = sum(len(found) for found in state.gaps.values())
    what = f"{wrong} of {names} private names are not" if wrong else f"all {names} private names are"
    click.echo(f"{what} as declared with {_versions(state)}")
    for name, part in parts.items():
        _print_part(name, part, state.gaps[name])


def _versions(state: State) -> str:
    versions = " and ".join(f"{library} {version}" for library, version in state.versions.items())
    return f"{versions}; a run checks what it uses in {state.milliseconds:.0f} ms"


def _print_part(name: str, part: Part, gaps: Mapping[str, str]) -> None:
    click.echo(f"\n{name}: {_loss(name)}")
    for use in part.uses:
        how = part.use(use)
        marks = [f"since {how.since}"] if how.since else []
        marks += ["patched"] if how.patched else ["assigned"] if how.set else []
        click.echo(f"  {use}" + (f" ({', '.join(marks)})" if marks else ""))
        click.echo(f"      {how.why}")
        if use in gaps:
            click.echo(f"      NOT AS DECLARED: {gaps[use]}")


def _loss(name: str) -> str:
    """What is lost without a part: of names that several parts share, what these lose."""
    parts = read_parts()
    if parts[name].without:
        return f"without it, {parts[name].without}"
    users = [each for each, part in parts.items() if each != name and part.without and name in with_needed(each)]
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
    """What `docs/options.md` is."""
    tables = tuple(_options_table(title, part) for title, part in PARTS_BY_TITLE.items())
    return markdown([Section(title="Options of `run`", blocks=(_OPTIONS, *tables))], level=1)


def _options_table(title: str, part: type[msgspec.Struct]) -> Table:
    rows = []
    for name, option in options_of(part).items():
        words = (option.short, option.flag.split("/")[0] + (f" {option.metavar}" if option.metavar else ""))
        values = f" One of {', '.join(option.choices)}." if option.choices else ""
        default = f" Default: {option.shown_default}." if option.shown_default else ""
        flags = ", ".join(f"`{each}`" for each in words if each)
        repeated = "yes" if name in RunOptions.__struct_fields__ else ""
        rows.append((flags, option.pytest or f"`{option.pytest_flag}`", repeated, option.help + values + default))
    return Table(title=title, columns=("option", "with pytest", "repeated", "meaning"), rows=tuple(rows))
