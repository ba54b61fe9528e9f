"""What follows from the declarations of the options of `run`: docs/options.md, defaults, words."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from harness.cli.baseline_update import update_command
from harness.cli.dev import mutate_command
from harness.cli.explain import options_markdown
from harness.cli.predict import measure_command
from harness.cli.run import run_command
from harness.errors import HarnessError
from harness.jsonform import from_json, to_json
from harness.matrix.case import Case
from harness.run_options import PlanOptions, RunOptions, option_named, options_of, words_of
from harness.running.plan import Plan, make_plan

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
VALUES: dict[str, object] = {
    "address": "node-0:6379",
    "timeout_s": 2.5,
    "timeout_factor": 3.0,
    "inject": ("a.py:f", "b.py:g"),
}


def test_the_page_lists_the_options_as_they_are_declared() -> None:
    assert PAGE.read_text() == options_markdown(), "run `fp8-harness explain --options > docs/options.md`"


@pytest.mark.parametrize("command", [run_command, update_command, mutate_command, measure_command])
def test_every_command_that_runs_cases_has_the_options_of_how(command: click.Command) -> None:
    has = {parameter.name for parameter in command.params}
    assert {name for name, option in options_of(PlanOptions).items() if not option.of_run} <= has


def test_the_default_of_an_option_is_that_of_a_plan() -> None:
    for name, option in options_of(PlanOptions).items():
        if name in Plan.__struct_fields__ and "auto" not in (*option.choices, *(option.metavar or "").split("|")):
            assert option.default in (None, getattr(Plan(), name)), name
    assert make_plan(device="cpu") == make_plan(device="cpu", fabric="auto", engine="zygote")


def a_value(name: str) -> object:
    option = option_named(name)
    return option.choices[-1] if option.choices else VALUES[name]


def test_every_option_that_is_repeated_is_stored_and_has_its_words() -> None:
    given = {name: a_value(name) for name in RunOptions.__struct_fields__}
    options = from_json(to_json(RunOptions(**given)), RunOptions)
    assert options.as_given == given
    assert {option.flag for option in options_of(RunOptions).values()} == {
        word for word in options.words if word.startswith("--")
    }
    assert options.words == words_of(given)


def test_every_option_that_is_repeated_is_in_the_command_of_a_case() -> None:
    plain = set(Plan().command("x").split())
    for name in RunOptions.__struct_fields__:
        if name in Plan.__struct_fields__:
            kind = options_of(RunOptions)[name]
            other = next(
                (each for each in kind.choices if each not in ("auto", getattr(Plan(), name))), VALUES.get(name)
            )
            words = Plan(**{name: other}).command("x").split()
            assert {kind.flag, *words_of({name: other})} <= set(words) - plain, name


def test_the_time_limit_of_a_case_is_multiplied() -> None:
    plain, slow = make_plan(device="cpu"), make_plan(device="cpu", timeout_factor=2.5)
    assert slow.deadline_s(Case()) == 2.5 * plain.deadline_s(Case())
    assert slow.command("x") == "fp8-harness run x --timeout-factor 2.5"
    assert make_plan(device="cpu", timeout_s=9.0, timeout_factor=1.0).deadline_s(Case()) == 9
    with pytest.raises(HarnessError, match=r"--timeout-factor: contradicts --timeout-s. Fix: give one of them"):
        make_plan(device="cpu", timeout_s=9.0, timeout_factor=2.0)


def test_a_rerun_repeats_no_time_limit_beside_a_factor_given_anew() -> None:
    stored = RunOptions(device="cpu", timeout_s=9.0)
    assert stored.besides(RunOptions(timeout_factor=2.0)) == RunOptions(device="cpu")
    assert RunOptions(timeout_factor=2.0).besides(RunOptions(timeout_s=9.0)) == RunOptions()
