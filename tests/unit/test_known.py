"""Recorded upstream faults: they are read strictly, hit the right cases, and only the recorded versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.matrix.caseid import parse_case_id
from harness.matrix.known import known_with_shipped, matching, read_known
from harness.verdict import Verdict
from tests.builders import make_known

RECORD = """\
[[fault]]
name = "nan-scale"
where = "tp>1 recipe=rowwise"
verdict = "crash"
requires = [{rule = "engine/raised", values = {error = "*scale * nan*"}}]
link = "https://github.com/pytorch/ao/issues/1"
torch = ">=2.13,<2.14"
review_by = 2027-03-01
reason = "An example."
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "known.toml"
    path.write_text(text)
    return path


def test_records_of_the_package_apply_everywhere_where_they_say_so(tmp_path: Path) -> None:
    shipped = tmp_path / "package" / "cases" / "known.toml"
    shipped.parent.mkdir(parents=True)
    other = RECORD.replace('name = "', 'name = "everywhere-')
    shipped.write_text(RECORD + other + 'everywhere = true\nfix = "cases/fixes/a.py:apply"\n')
    (fault,) = known_with_shipped(tmp_path / "none.toml", shipped)
    assert fault.name.startswith("everywhere-")
    assert fault.fix == f"{tmp_path / 'package' / 'cases' / 'fixes' / 'a.py'}:apply"
    own = write(tmp_path, other)
    assert known_with_shipped(own, shipped) == read_known(own), "the project's record replaces the package's"
    assert known_with_shipped(write(tmp_path, f'without = ["{fault.name}"]\n'), shipped) == ()
    with pytest.raises(HarnessError, match="did you mean everywhere-"):
        known_with_shipped(write(tmp_path, f'without = ["{fault.name}s"]\n'), shipped)
    assert known_with_shipped(shipped, shipped) == read_known(shipped)


def test_a_target_of_ones_own_may_show_what_a_llama_must() -> None:
    fault = make_known(everywhere=True)
    assert fault.must_show(parse_case_id("single-tensorwise-v2048-b16"))
    assert not fault.must_show(parse_case_id("target.mine-single-tensorwise-v2048-b16"))


def test_a_record_hits_its_cases(tmp_path: Path) -> None:
    (fault,) = faults = read_known(write(tmp_path, RECORD))
    assert fault.verdict is Verdict.CRASH
    assert matching((*faults, *faults), parse_case_id("tp2-rowwise-v2048-f32")) == (fault, fault)
    assert matching(faults, parse_case_id("tp2-tensorwise-v2048-f32")) == ()


@pytest.mark.parametrize(
    ("installed", "hit"),
    [
        ({"torch": "2.13.0+cpu", "torchao": "0.18.0"}, True),
        ({"torch": "2.13.1", "torchao": "0.18.2"}, True),
        ({"torch": "2.12.9", "torchao": "0.18.0"}, False),
        ({"torch": "2.14.0", "torchao": "0.18.0"}, False),
        ({"torch": "2.13.0a0+git12", "torchao": "0.18.0+git5"}, True),
        ({"torch": "2.13.0", "torchao": "0.19.0"}, False),
        ({"torch": "2.13.0", "torchtitan": "9.9"}, True),
        ({}, True),
    ],
)
def test_a_record_hits_its_versions(tmp_path: Path, installed: dict[str, str | None], hit: bool) -> None:
    (fault,) = read_known(write(tmp_path, RECORD + 'torchao = "==0.18.*"\n'))
    assert fault.affects(installed) is hit


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nan-scale", "", "known.toml:2: 'name' must be a non-empty string"),
        ('reason = "An example."', "", "known.toml:1: 'reason' must be a non-empty string"),
        ("crash", "crahs", "known.toml:4: Invalid enum value 'crahs' - at `$.verdict`. Fix: did you mean crash"),
        ("crash", "passed", "verdict 'passed' is not a failure"),
        ('"*scale * nan*"', "1", "known.toml:5: Expected `str | array`, got `int`"),
        ("rule = ", "ruel = ", "known.toml:5: Object contains unknown field `ruel`"),
        (
            '[{rule = "engine/raised", values = {error = "*scale * nan*"}}]',
            "[]",
            "known.toml:5: 'requires' must name at least one",
        ),
        ("2027-03-01", '"soon"', "known.toml:8: "),
        ("review_by = 2027-03-01\n", "", "missing required field `review_by`. Fix: write review_by = 2027-03-01."),
        ('torch = ">=2.13,<2.14"\n', "", "no version is named"),
        ("tp>1", "tpp>1", "unknown axis 'tpp'"),
        (">=2.13,<2.14", "2.13", "'2.13' is not a version specifier"),
        ("link =", "links =", "known.toml:6: unknown key 'links'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(HarnessError) as caught:
        read_known(write(tmp_path, RECORD.replace(old, new, 1)))
    assert message in caught.value.text


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="two faults are named 'nan-scale'"):
        read_known(write(tmp_path, RECORD + RECORD))


def test_the_records_of_the_project_are_readable() -> None:
    read_known(Path(__file__).parents[2] / "cases" / "known.toml")
