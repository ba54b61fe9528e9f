"""`fp8-harness explain`."""

from __future__ import annotations

from collections.abc import Iterable

import click

from harness.cli.options import root_option
from harness.errors import HarnessError
from harness.project import Project, find_project
from harness.running.briefs import known_here
from harness.spec.axes import axis_type, axis_values, case_from_axes, known_axis
from harness.spec.case import Case
from harness.spec.caseid import case_id, family_id, parse_case_id, reference_case
from harness.spec.fusion import executed_scaled_mm_calls, joints
from harness.spec.gemms import converted_fqns
from harness.spec.known import match_known
from harness.spec.rules import Rule
from harness.spec.rules import explain as explain_rules

_EPILOG = """\b
Examples:
  fp8-harness explain tp4-rowwise-v2256-f32
  fp8-harness explain tp=4 recipe=tensorwise               cells of tier pr and their rules
  fp8-harness explain output_layer=true --tier nightly
"""


@click.command("explain", epilog=_EPILOG)
@click.argument("words", metavar="CASE-ID | AXIS=VALUE...", nargs=-1, required=True)
@click.option("--tier", default="pr", show_default=True, metavar="TIER|FILE", help="Where to look for AXIS=VALUE.")
@root_option
def explain(words: tuple[str, ...], tier: str, root: str | None) -> None:
    """Say what a case is and which rules apply to it; or which rules forbid what in the cells of some axis values."""
    project = find_project(root)
    if any("=" in word for word in words):
        _explain_values(project, words, tier)
    elif len(words) == 1:
        _explain_case(project, parse_case_id(words[0]))
    else:
        raise HarnessError("more than one case id.", where="explain", fix="name one id, or AXIS=VALUE words only.")


def _explain_case(project: Project, case: Case) -> None:
    click.echo(case_id(case))
    click.echo("\naxes")
    default = axis_values(Case())
    for name, value in axis_values(case).items():
        mark = "" if value == default[name] else "  *"
        click.echo(f"  {name:<18} {_spelt(value)}{mark}")
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
    _print_joints(case)
    _print_rules(project, case)


def _print_joints(case: Case) -> None:
    """What async TP must fuse in one block of every kind, and what it cannot."""
    found = joints(case)
    if not found:
        return
    fused = sum(joint.fuses for joint in found)
    click.echo(f"\nasync TP: {fused} of {len(found)} collectives fused with matmuls per rank and step")
    kinds = dict.fromkeys((joint.phase, joint.collective, joint.purpose, joint.fuses) for joint in found)
    for phase, collective, purpose, fuses in kinds:
        click.echo(f"  {'fused' if fuses else 'plain':<6} {phase:<9} {collective:<15} {purpose}")


def _print_rules(project: Project, case: Case) -> None:
    click.echo("\nrules")
    found = explain_rules(case)
    _print_each("excluded", found.exclusions)
    if found.refusal is not None:
        _print_each("must be refused", [found.refusal])
        for gemm in found.refused_gemms:
            click.echo(f"    {gemm.fqn} {gemm.role}: m {gemm.m}, n {gemm.n}, k {gemm.k}")
    fault = match_known(known_here(project), case)
    if fault is not None:
        click.echo(f"  known fault: {fault.name}: {fault.reason} ({fault.link})")
    if not (found.exclusions or found.refusal or fault):
        click.echo("  none: the case must train and pass every check")


def _print_each(title: str, rules: Iterable[Rule]) -> None:
    for rule in rules:
        click.echo(f"  {title}: {rule.name}\n    {rule.reason}\n    {rule.source}")


def _explain_values(project: Project, words: tuple[str, ...], tier: str) -> None:
    from harness.running.cells import count_cells
    from harness.spec.casefile import read_case_file

    values = _parsed(words)
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


def _parsed(words: tuple[str, ...]) -> dict[str, object]:
    """The axis values of `axis=value` words, each of the type of its axis."""
    values: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise HarnessError("this is no AXIS=VALUE.", where=word, fix="name one case id, or AXIS=VALUE words only.")
        values[known_axis(name)] = _value(known_axis(name), text)
    case_from_axes(values)  # refuses values that no case can have
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
        raise HarnessError(
            f"'{text}' is no {kind.__name__}.", where=f"{name}={text}", fix="see the axes in the README."
        ) from None


def _spelt(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
