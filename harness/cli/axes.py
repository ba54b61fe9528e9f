"""Options with the names of axes, and the case that they describe: by themselves, or with a model or a case by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

from harness.cli.options import AT_LEAST_1, Command, compose_options
from harness.errors import HarnessError
from harness.matrix.axes import AXES, DECLARED, axis_type, axis_values, case_from_axes, choices, ignored_axes
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.layout import DP_AXES, REST, left_over, ranks_of
from harness.matrix.rules import exclusions

MAX_WORLD = 4096

_SHORT = {"vocab_size": ("--vocab",)}

# Axes that change the cost of a step: options of the same name override those of a named model or a case.
_OF_COST = tuple(name for name, axis in DECLARED.items() if axis.costs)


def axis_options(names: Collection[str] = tuple(AXES), *, defaults: bool = True) -> Callable[[Command], Command]:
    """One option for each of these axes, of its name, type and choices. None, or (): not given."""

    return compose_options(*(_axis_option(name, defaults=defaults) for name in names))


def _axis_option(name: str, *, defaults: bool) -> Callable[[Command], Command]:
    option, kind, meaning = f"--{name.replace('_', '-')}", axis_type(name), DECLARED[name].meaning
    if kind is tuple:
        return click.option(option, name, metavar="NAME", multiple=True, help=f"{meaning}. Repeatable.")
    text = f"{meaning}. Default: {_word(axis_values(Case())[name])}." if defaults else f"{meaning}."
    if kind is bool:
        return click.option(f"{option}/--no-{option[2:]}", name, default=None, help=text)
    known = [str(each) for each in choices(name)]
    words = (option, *_SHORT.get(name, ()), name)
    return click.option(*words, type=click.Choice(known) if known else kind, help=text)


def given_axes(options: Mapping[str, object]) -> dict[str, object]:
    """The axes that the user gave."""
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


def configuration_options(command: Command) -> Command:
    """`[CASE-ID] --case ID --model NAME --tokens N --world N` and axes, passed to the command as one
    parameter `case`.

    A named model, or a case, with the given axes in the place of its own. No rule excludes the case.
    """

    @functools.wraps(command)
    def with_case(
        *,
        case_name: str | None,
        case_id: str | None,
        model: str | None,
        tokens: int | None,
        world: int | None,
        **given: Any,
    ) -> Any:
        axes = given_axes({name: given.pop(name) for name in _OF_COST})
        names = [name for name in (case_name, case_id, model) if name is not None]
        if len(names) != 1:
            what = f"there are {len(names)} of them: {', '.join(names)}." if names else "there is no case."
            raise HarnessError(what, fix="give one case id, or --model NAME.")
        return command(case=_configured(case_name or case_id, model, tokens, world, axes), **given)

    return compose_options(
        click.argument("case_name", metavar="[CASE-ID]", required=False),
        click.option("--case", "case_id", metavar="ID", help="The same as CASE-ID."),
        click.option("--model", metavar="NAME", help="Instead of a case: llama3-8b, llama3-70b, llama3-405b, …"),
        click.option("--tokens", type=AT_LEAST_1, help="Tokens per data-parallel rank and step."),
        click.option(
            "--world",
            type=click.IntRange(min=1, max=MAX_WORLD),
            help="Total ranks; FSDP takes those that TP and replicas leave.",
        ),
        axis_options(_OF_COST, defaults=False),
    )(with_case)


def _configured(
    name: str | None, model: str | None, tokens: int | None, world: int | None, axes: dict[str, object]
) -> Case:
    from harness.performance.models import named_model, training

    if world is not None and REST in axes:
        raise HarnessError("--world gives it.", where=_options([REST]), fix="leave one of them out.")
    if model is not None:
        case = training(named_model(model), tokens=tokens, **axes)
    else:
        if tokens is not None:
            raise HarnessError("a case has its own.", where="--tokens", fix="give --global-batch and --seq-len.")
        case = case_from_axes({**axis_values(parse_case_id(name or "")), **axes})
    if world is not None:
        case = _on_ranks(case, world, batch_given="global_batch" in axes)
    require_allowed(case, axes, where=name or f"--model {model}")
    return case


def _on_ranks(case: Case, world: int, *, batch_given: bool) -> Case:
    """The case on another number of ranks: each keeps its sequences where no global batch is given."""
    values = axis_values(case)
    values[REST] = left_over(world, values, where="--world")
    if not batch_given:
        values["global_batch"] = max(1, case.local_batch) * ranks_of(values, DP_AXES)
    return case_from_axes(values)


def _word(value: object) -> str:
    return "none" if value is None else str(value).lower()


def _options(names: Collection[str]) -> str:
    return " or ".join(f"--{name.replace('_', '-')}" for name in names)
