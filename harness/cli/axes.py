"""Axes on a command line: the everyday ones as options, all by `--set`; and the case that they describe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

from harness.cli.options import AT_LEAST_1, Command, compose_options, run_option
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
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.layout import REST, left_over
from harness.matrix.rules import exclusions

MAX_WORLD = 4096
_WIDE = 50  # values that do not stand beside the name of their option

# Why predictions and timings have no use for these axes.
_OF_PREDICTIONS = {"steps": "every step costs the same", "target": "a Llama costs the same, whoever trains it"}


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


def configured_case(command: Command) -> Command:
    """Apply `configured_cases` of one case, passed to the command as one parameter `case`."""

    @functools.wraps(command)
    def with_case(*, cases: tuple[Case, ...], **given: Any) -> Any:
        return command(case=cases[0], **given)

    return configured_cases(with_case, metavar="[CASE-ID]", nargs=1)


def configured_cases(command: Command, *, metavar: str = "[CASE-ID]...", nargs: int = -1) -> Command:
    """Add `[CASE-ID]... --model NAME --tokens N --world N` and axes, passed to the command as one parameter `cases`.

    Cases, or a named model, with the given axes in the place of their own. No rule excludes them.
    """

    @functools.wraps(command)
    def with_cases(
        *,
        named: str | tuple[str, ...] | None,
        model: str | None,
        tokens: int | None,
        world: int | None,
        axes: dict[str, object],
        **given: Any,
    ) -> Any:
        ids = (named,) if isinstance(named, str) else named or ()
        if bool(ids) == (model is not None):
            what = f"there are both {', '.join(ids)} and --model {model}." if ids else "there is no case."
            raise HarnessError(what, fix="give CASE-ID, or --model NAME.")
        if ids and tokens is not None:
            raise HarnessError("a case has its own.", where="--tokens", fix="set global_batch and seq_len.")
        cases = {name: case_from_axes({**axis_values(parse_case_id(name)), **axes}) for name in ids}
        if model is not None:
            from harness.matrix.models import named_model, training

            cases[f"--model {model}"] = training(named_model(model), tokens=tokens, **axes)
        return command(cases=tuple(_placed(case, where, world, axes) for where, case in cases.items()), **given)

    return compose_options(
        click.argument("named", metavar=metavar, nargs=nargs, required=False),
        click.option("--model", metavar="NAME", help="Instead of a case: llama3-8b, llama3-70b, llama3-405b, …"),
        click.option("--tokens", type=AT_LEAST_1, help="Tokens per data-parallel rank and step."),
        click.option(
            "--world",
            type=click.IntRange(min=1, max=MAX_WORLD),
            help="Total ranks; FSDP takes those that TP and replicas leave.",
        ),
        axes_parameter(without=_OF_PREDICTIONS, defaults=False),
    )(with_cases)


def _placed(case: Case, where: str, world: int | None, axes: dict[str, object]) -> Case:
    """Return the case on another number of ranks, if any: each keeps its sequences where no global batch is given."""
    if world is not None:
        if REST in axes:
            raise HarnessError("--world gives it.", where=option_of(REST), fix="leave one of them out.")
        values = axis_values(case)
        values[REST] = left_over(world, values, where="--world")
        placed = case_from_axes(values)
        if "global_batch" not in axes:
            placed = case_from_axes({**values, "global_batch": max(1, case.local_batch) * placed.layout.batches})
        case = placed
    require_allowed(case, axes, where=where)
    return case
