"""Files of cases: what is read, what is written, and the schema of both."""

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.jsonform import compact
from harness.matrix.axes import AXES, DECLARED
from harness.matrix.case import Case, Float8, Layout, Train
from harness.matrix.casefile import FILE_NAME, case_file_schema, parse_case_file, read_case_file, write_case
from harness.matrix.rules import exclusions
from harness.project import is_case_file
from tests.examples import examples
from tests.strategies import POSSIBLE_CASES

GOOD = """\
description = "example"
[select]
strength = 3
max_world_size = 8
[base]
steps = 2
[[matrix]]
name = "one"
base = {dtype = "bfloat16"}
[matrix.axes]
tp = [1, 2]
gather = [
  {recipe = "tensorwise", fp8_all_gather = true},
  {recipe = "bf16"},
]
[[case]]
id = "tp2-rowwise-v2048-f32"
[[case]]
axes = {tp = 4, recipe = "tensorwise"}
"""


def test_a_whole_file() -> None:
    file = parse_case_file(GOOD, where="cases/example.toml")
    assert (file.name, file.description, file.strength, file.max_world_size) == ("example", "example", 3, 8)
    assert file.cases == (
        Case(layout=Layout(tp=2), float8=Float8(recipe="rowwise")),
        Case(layout=Layout(tp=4), float8=Float8(recipe="tensorwise"), train=Train(steps=2)),  # of [base]
    )
    (block,) = file.blocks
    assert block.base == {"steps": 2, "dtype": "bfloat16"}
    assert [(group.name, len(group.values)) for group in block.groups] == [("tp", 2), ("gather", 2)]
    assert block.groups[1].label(0) == "recipe=tensorwise,fp8_all_gather=true"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("strength = 3", "strength = 4", "f.toml:3: strength = 4. Fix: use 2, 3"),
        ("strength = 3", "strenght = 3", "f.toml:3: unknown key 'strenght'. Fix: did you mean strength"),
        ("max_world_size = 8", "max_world_size = 0", "f.toml:4: max_world_size = 0"),
        ("steps = 2", "steps = 0", "f.toml:6: steps = 0"),
        ("steps = 2", "stepz = 2", "f.toml:6: unknown key 'stepz'. Fix: did you mean steps"),
        ("steps = 2", "lr = nan", "f.toml:6: lr = nan"),
        ('name = "one"', "", "f.toml:7: a matrix needs a name"),
        ("tp = [1, 2]", "tp = 2", "f.toml:11: axis 'tp' needs a list"),
        ("tp = [1, 2]", "tp = []", "f.toml:11: axis 'tp' needs a list"),
        ("tp = [1, 2]", "tp = [1, 1]", "f.toml:11: axis 'tp' lists"),
        ("tp = [1, 2]", "tpp = [1, 2]", "f.toml:11: unknown axis 'tpp'. Fix: did you mean tp"),
        ('id = "', 'axes = {}\nid = "', "a case needs either an id or axes. Fix: remove one of them"),
        (
            "tp = [1, 2]",
            'where = ["tp2"]',
            "unknown axis 'where'. Fix: write where = [{}, {tp = 2}]: a table of axes for each value",
        ),
        ("tp = [1, 2]", 'recipe = ["bf16"]', "f.toml:12: axis 'recipe' is set by both 'recipe' and 'gather'"),
        ('recipe = "bf16"', 'recipe = "bf17"', "f.toml:12: recipe = bf17"),
        ("tp2-rowwise", "tp2-rowwize", "f.toml:17: case id 'tp2-rowwize-v2048-f32': unknown token 'rowwize'"),
        ("{tp = 4, ", "{tp = 3, ", "f.toml:18: rule heads_divide_tp excludes"),
        ("{tp = 4, recipe", "{loss_parallel = false, recipe", "f.toml:19: this case ignores loss_parallel"),
        ("axes = {", "axis = {", "f.toml:19: unknown key 'axis'. Fix: did you mean axes"),
        ("[[case]]\nid", "[case]\nid", "f.toml"),
        ("tp = [1, 2]", "tp = [1, 2", "f.toml:12: malformed TOML"),
    ],
)
def test_mistakes_are_named_with_their_line(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(HarnessError, match=re.escape(message)):
        parse_case_file(GOOD.replace(old, new, 1), where="f.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.toml: this file has no cases. Fix: add a [[case]] with an id or axes, or a [[matrix]]"),
        ("[[case]]\naxes = {}\n[[case]]\naxes = {tp = 1}\n", "f.toml:3: single-bf16-v2048-f32 is here twice"),
        ("[[case]]\nid = 3\n", 'f.toml:2: id must be a string. Fix: write id = "tp2-tensorwise-v2048-b16"'),
        ('[[case]]\naxes = {tp = "two"}\n', "Expected `int`, got `str`. Fix: write a value like 1"),
        ("[[case]]\naxes = {async_tp = true, tp = 2}\n", "use plain TP. Fix: change async_tp"),
        ('[[case]]\nid = "atp2-bf16-v2048-f32"\n', "Fix: see `fp8-harness explain atp2-bf16-v2048-f32`"),
    ],
)
def test_mistakes_say_how_to_fix_them(text: str, message: str) -> None:
    with pytest.raises(HarnessError, match=re.escape(message)):
        parse_case_file(text, where="f.toml")


@given(st.from_type(Case))
def test_a_written_case_is_valid_and_reads_back(case: Case) -> None:
    text = write_case(case, schema="case.schema.json", command="fp8-harness run f.toml")
    VALIDATOR.validate(tomllib.loads(text))
    if exclusions(case):
        with pytest.raises(HarnessError, match="excludes"):
            parse_case_file(text, where="f.toml")
    else:
        assert parse_case_file(text, where="f.toml").cases == (case,)


@given(POSSIBLE_CASES)
def test_the_comments_of_a_written_case_are_its_other_axes(case: Case) -> None:
    text = write_case(case, schema="s", command="c")
    shown = re.sub(r"^# (?=\w+ = )(?!loss_tolerance|max_norm)", "", text, flags=re.MULTILINE)
    assert parse_case_file(shown, where="f.toml").cases == (case,)
    assert all(f"{name} = " in shown for name in AXES)


_WORDS = st.sampled_from(["select", "base", "matrix", "case", "name", "axes", "id", "strength", "description", *AXES])
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def _without_none(value: object) -> object:
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value if item is not None] if isinstance(value, list) else value


@given(st.dictionaries(_WORDS, _TREES, max_size=5))
def test_any_table_reads_or_is_refused(tree: dict[str, object]) -> None:
    _read_or_refuse(tomli_w.dumps(_without_none(tree)))  # type: ignore[arg-type]


@given(st.text(max_size=200))
def test_any_text_reads_or_is_refused(text: str) -> None:
    _read_or_refuse(text)


@settings(max_examples=examples(150))
@given(st.data())
def test_any_damaged_file_reads_or_is_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(GOOD)))
    end = data.draw(st.integers(start, min(len(GOOD), start + 20)))
    patch = data.draw(
        st.text(max_size=5) | st.sampled_from(["[", "]", "{}", "=", "nan", "-1", '"', "\n", "[[matrix]]\n"])
    )
    _read_or_refuse(GOOD[:start] + patch + GOOD[end:])


def _read_or_refuse(text: str) -> None:
    try:
        parse_case_file(text, where="f.toml")
    except HarnessError as error:
        assert error.text.startswith("f.toml")


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000])
def test_hostile_toml_is_refused(text: str) -> None:
    with pytest.raises(HarnessError):
        parse_case_file(text, where="f.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no such file"):
        read_case_file(tmp_path / "missing.toml")
    with pytest.raises(HarnessError, match="cannot be read"):
        read_case_file(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(HarnessError, match="not UTF-8"):
        read_case_file(tmp_path / "bad.toml")


ROOT = Path(__file__).parents[2]
SCHEMA = case_file_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
FILES = sorted(path for path in (ROOT / "cases").glob("*.toml") if is_case_file(path))


def test_the_stored_schema_is_the_one_that_the_axes_give_with_their_meanings() -> None:
    stored = (ROOT / "harness" / "schemas" / FILE_NAME).read_text()
    assert stored == f"{compact(SCHEMA)}\n", (
        f"run `fp8-harness new --schema > harness/schemas/{FILE_NAME}`: an axis has changed"
    )
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert DECLARED.keys() == AXES.keys()
    assert all(SCHEMA["$defs"][name]["description"] == DECLARED[name].meaning for name in AXES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_of_this_project_are_valid(path: Path) -> None:
    VALIDATOR.validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        '[[case]]\naxes = {recipee = "rowwise"}',
        '[[case]]\naxes = {recipe = "rowwize"}',
        "[[case]]\naxes = {tp = 0}",
        "[[case]]\naxes = {tp = 2.5}",
        "[[case]]\naxes = {dim = 'x'}",
        "[[case]]",
        '[[case]]\nid = "a"\naxes = {tp = 2}',
        "[[matrix]]\nname = 'm'",
        "[[matrix]]\nname = 'm'\n[matrix.axes]\ntp = []",
        "[[matrix]]\nname = 'm'\n[matrix.axes]\ntp = [0]",
        "[[matrix]]\nname = 'm'\n[matrix.axes]\nboth = [{tpp = 2}]",
        "[select]\nstrength = 4",
        "[base]\ncompile = true",
        "axes = 2",
    ],
)
def test_mistakes_are_rejected(text: str) -> None:
    document: dict[str, Any] = tomllib.loads(text)
    assert not VALIDATOR.is_valid(document)
