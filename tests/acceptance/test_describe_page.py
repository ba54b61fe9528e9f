"""The page that is handed to whoever describes a case: short, true, and every example explains itself."""

from __future__ import annotations

import re

import pytest

from harness.matrix.axes import AXES, DEFAULTS, checked_value, choices
from harness.matrix.casefile import parse_case_file
from harness.matrix.caseid import case_id
from harness.matrix.model import MODEL_PRESETS
from harness.matrix.rules import exclusions
from tests.acceptance.conftest import REPOSITORY, Command

PAGE = (REPOSITORY / "docs" / "describe-a-case.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.*?)^```", PAGE.partition("## Examples")[2], flags=re.MULTILINE | re.DOTALL)
ROWS = re.findall(r"^\| (`\w.*?) \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
# Left to `new --schema`: they change how a run is done or checked, and no description of a job has them.
NOT_ON_THE_PAGE = {"target", "model", "symm_mem", "wait_for_embedding", "reduce_grads", "seed", "loss_tolerance"}


def test_it_is_short_and_has_twelve_examples() -> None:
    assert len(EXAMPLES) == 12 and len(PAGE.split()) <= 1200


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_a_case_that_explains_itself(shared: Command, text: str) -> None:
    (case,) = parse_case_file(text, where="page").cases
    assert case.world_size <= 8 and not exclusions(case)
    done = shared.call("explain", case_id(case))
    assert done.returncode == 0 and done.stdout.startswith(case_id(case)), done.stderr


def test_the_table_has_the_keys_their_values_and_defaults() -> None:
    names = [name for keys, _, _ in ROWS for name in re.findall(r"`(\w+)`", keys)]
    assert {*names} == AXES.keys() - NOT_ON_THE_PAGE and len(names) == len(set(names))
    for keys, values, defaults in ROWS:
        named, words = re.findall(r"`(\w+)`", keys), {*re.findall(r"\w+", values)}
        for name in named:
            if len(named) == 1 or choices(name) == (True, False):
                assert {str(choice).lower() for choice in choices(name)} <= words, name
        shown = defaults.split(", ")
        for name, default in zip(named, shown if len(shown) > 1 else shown * len(named), strict=True):
            real = getattr(MODEL_PRESETS["tiny"], name, DEFAULTS[name])
            assert default == "none" if real in (None, ()) else checked_value(name, _typed(default)) == real, name


def _typed(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return float(text) if re.fullmatch(r"[\d.]+", text) else text
