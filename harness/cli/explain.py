"""`fp8-harness explain`."""

from __future__ import annotations

from collections.abc import Iterable

import click

from harness.cli.options import root_option
from harness.errors import HarnessError
from harness.expect.expectations import FORMULAS, version_gap
from harness.expect.fusion import executed_scaled_mm_calls, fusion_candidates
from harness.matrix.axes import axis_type, axis_values, case_from_axes, known_axis
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, parse_case_id, reference_case
from harness.matrix.known import matching
from harness.matrix.linears import converted_fqns
from harness.matrix.rules import Rule
from harness.matrix.rules import explain as explain_rules
from harness.project import Project, find_project
from harness.running.case_judge import known_here
from harness.running.machine import installed_version

_EPILOG = """\b
Examples:
  fp8-harness explain tp4-rowwise-v2256-f32
  fp8-harness explain tp=4 recipe=tensorwise               the rules for these cells of tier pr
  fp8-harness explain output_layer=true --tier nightly
"""


@click.command("explain", epilog=_EPILOG)
@click.argument("words", metavar="CASE-ID | AXIS=VALUE...", nargs=-1, required=True)
@click.option("--tier", default="pr", show_default=True, metavar="TIER|FILE", help="Matrix to search for AXIS=VALUE.")
@root_option
def explain(words: tuple[str, ...], tier: str, root: str | None) -> None:
    """Describe a case and its rules, or the rules that forbid cells with the given axis values."""
    project = find_project(root)
    if any("=" in word for word in words):
        _explain_values(project, words, tier)
    elif len(words) == 1:
        _explain_case(project, parse_case_id(words[0]))
    else:
        raise HarnessError("got more than one case id.", where="explain", fix="give one id, or only AXIS=VALUE words.")


def _explain_case(project: Project, case: Case) -> None:
    click.echo(case_id(case))
    click.echo("\naxes")
    default = axis_values(Case())
    for name, value in axis_values(case).items():
        mark = "" if value == default[name] else "  *"
        click.echo(f"  {name:<18} {_text(value)}{mark}")
    fqns = converted_fqns(case)
    click.echo("\nrun")
    click.echo(f"  {'world size':<18} {case.world_size}")
    click.echo(f"  {'tokens per rank':<18} {case.tokens_per_rank}")
    click.echo(f"  {'golden family':<18} {family_id(case)}")
    click.echo(f"  {'reference case':<18} {case_id(reference_case(case))}")
    click.echo(f"  {'scaled matmuls':<18} {executed_scaled_mm_calls(case)} per rank and step")
    click.echo(f"  {'FP8 linears':<18} {len(fqns)}")
    for fqn in fqns:
        click.echo(f"    {fqn}")
    _print_fusion_candidates(case)
    _print_unverified()
    _print_rules(project, case)


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


def _print_unverified() -> None:
    """Print the formulas that were not verified with the installed versions: their checks are not judged here."""
    installed = {name: installed_version(name) for name in ("torch", "torchao")}
    software = {name: version for name, version in installed.items() if version is not None}
    gaps = [gap for gap in (version_gap(formula, software) for formula in FORMULAS) if gap is not None]
    if gaps:
        click.echo("\nnot judged here")
    for gap in gaps:
        click.echo(f"  {gap}")


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
        for title, symptoms in (("must show", fault.requires), ("may cause", fault.may_cause)):
            for symptom in symptoms:
                click.echo(f"    {title} {symptom}")
        if fault.fix is not None:
            click.echo(f"    runs again with {fault.fix}: every check must pass")
    if not (found.exclusions or found.refusal or faults):
        click.echo("  none: the case must train and pass all checks")


def _print_each(title: str, rules: Iterable[Rule]) -> None:
    for rule in rules:
        click.echo(f"  {title}: {rule.name}\n    {rule.reason}\n    {rule.source}")


def _explain_values(project: Project, words: tuple[str, ...], tier: str) -> None:
    from harness.matrix.casefile import read_case_file
    from harness.matrix.census import count_cells

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


def _parse(words: tuple[str, ...]) -> dict[str, object]:
    """The values of `axis=value` words, converted to the types of the axes."""
    values: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise HarnessError("this is not AXIS=VALUE.", where=word, fix="give one case id, or only AXIS=VALUE words.")
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
