"""Axes on a command line: the everyday ones as options, all by `--set`; and the case that they describe."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

from harness.cli.options import Command, compose_options, run_option
from harness.errors import HarnessError
from harness.matrix.axes import (
    DECLARED,
    axis_type,
    axis_values,
    case_from_axes,
    choices,
    ignored_axes,
    option_of,
    read_assignments,
    said,
    shown_value,
)
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.rules import exclusions

_WIDE = 50  # values that do not stand beside the name of their option


def axes_parameter(*, without: Mapping[str, str] | None = None, defaults: bool = True) -> Callable[[Command], Command]:
    """Return the decorator for `--tp 2 … --set AXIS=VALUE`, passed to the command as one parameter `axes`, by name.

    `without`: why this command does not take an axis. `defaults`: help names those of axes.
    """
    refused = without or {}
    names = [name for name, axis in DECLARED.items() if axis.everyday and name not in refused]

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def with_axes(*, axes: tuple[str, ...], **given: Any) -> Any:
            options = {name: value for name in names if (value := given.pop(name)) is not None}
            values = read_assignments(axes, option="--set")
            for name in values:
                if name in options or name in refused:
                    why = refused.get(name) or f"{said(name, options[name])} says it"
                    raise HarnessError(f"{why}.", where=f"--set {name}", fix="leave it out.")
            return command(axes=options | values, **given)

        every = run_option("axes", "Give any axis a value; a file of `new` lists them. Repeatable.")
        return compose_options(*(_axis_option(name, defaults=defaults) for name in names), every)(with_axes)

    return decorated


def _axis_option(name: str, *, defaults: bool) -> Callable[[Command], Command]:
    known, meaning = [str(choice) for choice in choices(name)], DECLARED[name].meaning
    text = f"{meaning}. Default: {shown_value(axis_values(Case())[name])}." if defaults else f"{meaning}."
    form: dict[str, Any] = {"type": click.Choice(known) if known else axis_type(name)}
    if len("|".join(known)) > _WIDE:
        form |= {"metavar": name.upper()}
        text += f" One of {', '.join(known)}."
    return click.option(option_of(name), name, help=text, **form)


def checked_case(axes: Mapping[str, object], *, where: str) -> Case:
    """Return the case of these axes; HarnessError with the axes to change, for one that no file may have."""
    case, ignored = case_from_axes(axes), ignored_axes(axes)
    if ignored:
        what = f"this case ignores {' or '.join(ignored)}."
        raise HarnessError(what, where=where, fix="leave it out, or change the axis that disables it.")
    require_allowed(case, axes, where=where)
    return case


def require_allowed(case: Case, axes: Collection[str], *, where: str) -> None:
    """Raise HarnessError with the axes to change, of `axes` where one of them is to blame, for an excluded case."""
    for rule in exclusions(case):
        changed = [name for name in rule.axes if name in axes] or rule.axes
        what = f"rule {rule.name} excludes {case_id(case)}: {rule.reason}."
        raise HarnessError(what, where=where, fix=f"change {' or '.join(changed)}.")
