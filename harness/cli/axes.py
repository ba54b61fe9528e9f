"""Options with the names of axes, and the case that they describe: by themselves, or with a model or a case by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

from harness.cli.options import AT_LEAST_1, Command, compose_options
from harness.errors import HarnessError
from harness.matrix.axes import (
    AXES,
    DECLARED,
    axis_type,
    axis_values,
    case_from_axes,
    choices,
    ignored_axes,
    shown_value,
)
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.layout import REST, left_over
from harness.matrix.rules import exclusions

MAX_WORLD = 4096

_SHORT = {"vocab_size": ("--vocab",)}

# Axes that change the cost of a step: options of the same name override those of a named model or a case.
_OF_COST = tuple(name for name, axis in DECLARED.items() if axis.costs)


def axis_options(names: Collection[str] = tuple(AXES), *, defaults: bool = True) -> Callable[[Command], Command]:
    return compose_options(*(_axis_option(name, defaults=defaults) for name in names))


def _axis_option(name: str, *, defaults: bool) -> Callable[[Command], Command]:
    option, kind, meaning = f"--{name.replace('_', '-')}", axis_type(name), DECLARED[name].meaning
    if kind is tuple:
        return click.option(option, name, metavar="NAME", multiple=True, help=f"{meaning}. Repeatable.")
    text = f"{meaning}. Default: {shown_value(axis_values(Case())[name])}." if defaults else f"{meaning}."
    if kind is bool:
        return click.option(f"{option}/--no-{option[2:]}", name, default=None, help=text)
    known = [str(choice) for choice in choices(name)]
    words = (option, *_SHORT.get(name, ()), name)
    return click.option(*words, type=click.Choice(known) if known else kind, help=text)


def given_axes(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if value not in (None, ())}


def checked_case(axes: Mapping[str, object], *, where: str) -> Case:
    """The case of these axes; HarnessError with the options to change, for one that no file may have."""
    case, ignored = case_from_axes(axes), ignored_axes(axes)
    if ignored:
        what = f"this case ignores {_options(ignored)}."
        raise HarnessError(what, where=where, fix="leave it out, or change the option that disables it.")
    require_allowed(case, axes, where=where)
    return case


def require_allowed(case: Case, axes: Collection[str], *, where: str) -> None:
    """HarnessError with the options to change, of `axes` where one of them is to blame, for a case that is excluded."""
    for rule in exclusions(case):
        changed = [name for name in rule.axes if name in axes] or rule.axes
        what = f"rule {rule.name} excludes {case_id(case)}: {rule.reason}."
        raise HarnessError(what, where=where, fix=f"change {_options(changed)}.")


def configured_case(command: Command) -> Command:
    """`configured_cases` of one case, passed to the command as one parameter `case`."""

    @functools.wraps(command)
    def with_case(*, cases: tuple[Case, ...], **given: Any) -> Any:
        return command(case=cases[0], **given)

    return configured_cases(with_case, metavar="[CASE-ID]", nargs=1)


def configured_cases(command: Command, *, metavar: str = "[CASE-ID]...", nargs: int = -1) -> Command:
    """`[CASE-ID]... --model NAME --tokens N --world N` and axes, passed to the command as one parameter `cases`.

    Cases, or a named model, with the given axes in the place of their own. No rule excludes them.
    """

    @functools.wraps(command)
    def with_cases(
        *, named: str | tuple[str, ...] | None, model: str | None, tokens: int | None, world: int | None, **given: Any
    ) -> Any:
        axes = given_axes({name: given.pop(name) for name in _OF_COST})
        ids = (named,) if isinstance(named, str) else named or ()
        if bool(ids) == (model is not None):
            what = f"there are both {', '.join(ids)} and --model {model}." if ids else "there is no case."
            raise HarnessError(what, fix="give CASE-ID, or --model NAME.")
        if ids and tokens is not None:
            raise HarnessError("a case has its own.", where="--tokens", fix="give --global-batch and --seq-len.")
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
        axis_options(_OF_COST, defaults=False),
    )(with_cases)


def _placed(case: Case, where: str, world: int | None, axes: dict[str, object]) -> Case:
    """The case on another number of ranks, if any: each keeps its sequences where no global batch is given."""
    if world is not None:
        if REST in axes:
            raise HarnessError("--world gives it.", where=_options([REST]), fix="leave one of them out.")
        values = axis_values(case)
        values[REST] = left_over(world, values, where="--world")
        placed = case_from_axes(values)
        if "global_batch" not in axes:
            placed = case_from_axes({**values, "global_batch": max(1, case.local_batch) * placed.layout.batches})
        case = placed
    require_allowed(case, axes, where=where)
    return case


def _options(names: Collection[str]) -> str:
    return " or ".join(f"--{name.replace('_', '-')}" for name in names)
