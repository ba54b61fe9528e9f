"""Axes of cases, and selectors of cases by them."""

import math
import operator
import re
import tomllib
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix import axes
from harness.matrix.axes import (
    AXES,
    axis_type,
    axis_values,
    case_from_axes,
    checked_value,
    choices,
    ignored_axes,
    option_of,
    read_as,
    read_assignments,
    read_value,
    said,
    shown_value,
    suggestion,
)
from harness.matrix.case import Case, Float8, Layout, Model
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.selector import parse_selector


@given(st.from_type(Case))
def test_a_case_goes_to_axes_and_back_ignores_none_and_a_target_reads_them(case: Case) -> None:
    assert case_from_axes(axis_values(case)) == case
    assert ignored_axes(axis_values(case)) == ()
    read = {name: operator.attrgetter(read_as(name).removeprefix("case."))(case) for name in AXES}
    wide = "float32" if case.train.dtype == "bfloat16" else case.train.dtype
    for name in ("reduce_dtype", "parameter_dtype"):
        assert read.pop(name) == ("bfloat16" if getattr(case.train, name) == "bfloat16" else wide)
    assert read.items() <= axis_values(case).items()


def test_every_field_of_a_case_has_an_axis() -> None:
    fields = {
        (part, field)
        for part in ("model", "layout", "float8", "checkpointing", "train", "checks")
        for field in type(getattr(Case(), part)).__struct_fields__
    }
    assert set(AXES.values()) == fields | {("compile",), ("target",)}


def test_values_reach_their_place_and_what_is_no_axis_or_does_not_fit_is_refused() -> None:
    assert case_from_axes({}) == Case()
    case = case_from_axes({"tp": 2, "recipe": "rowwise", "vocab_size": 2256, "filter_fqns": ["wk", "wq"]})
    assert case == Case(
        model=Model(vocab_size=2256), layout=Layout(tp=2), float8=Float8(recipe="rowwise", filter_fqns=("wk", "wq"))
    )
    with pytest.raises(HarnessError, match=r"unknown axis 'vocabsize'\. Fix: did you mean vocab_size"):
        case_from_axes({"vocabsize": 3})
    with pytest.raises(HarnessError, match="does not split into 3 heads"):
        case_from_axes({"heads": 3, "kv_heads": 3})


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("recipe", "tensorwize", "recipe = tensorwize: .*did you mean tensorwise"),
        ("tp", 0, "tp = 0: .*>= 1"),
        ("tp", True, "tp = true: Expected `int`"),
        ("dp_shard", "2", "dp_shard = 2: Expected `int`"),
        ("filter_fqns", ["a-b"], "filter_fqns"),
        ("vocab_size", 0, "vocab_size = 0"),
        ("steps", 0, "steps = 0"),
        ("lr", math.nan, "lr"),
        ("loss_tolerance", math.inf, "loss_tolerance"),
        ("loss_tolerance", math.nan, "loss_tolerance"),
    ],
)
def test_an_impossible_value_is_refused_either_way(axis: str, value: object, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        checked_value(axis, value)
    with pytest.raises(HarnessError):
        case_from_axes({axis: value})


def test_ignored_options_are_found() -> None:
    assert ignored_axes({"recipe": "bf16", "pad_inner_dim": True, "output_layer": False}) == ("pad_inner_dim",)
    assert ignored_axes({"tp": 1, "loss_parallel": False}) == ("loss_parallel",)
    assert ignored_axes({"checkpointing": "full", "checkpoint_every": 3}) == ("checkpoint_every",)
    assert ignored_axes({"dim": 128, "loss_tolerance": None}) == ()


def test_types_and_choices() -> None:
    assert axis_type("tp") is int
    assert axis_type("lr") is float
    assert axis_type("loss_tolerance") is float
    assert axis_type("async_tp") is bool
    assert axis_type("recipe") is str
    assert axis_type("filter_fqns") is tuple
    assert choices("tp_styles") == ("plain", "float8")
    assert choices("async_tp") == (True, False)
    assert choices("seed") == ()


CASE = parse_case_id("fsdp2-tp4-tensorwise-ag.fp8-filter.wk+wq-ac.full-v2256-f32")


TERMS = {
    "": True,
    "tp=4": True,
    "tp=4,8": True,
    "tp=2,8": False,
    "tp!=4": False,
    "tp!=2,8": True,
    "recipe!=bf16 tp=4": True,
    "recipe!=bf16 tp=2": False,
    "vocab_size>=2256": True,
    "vocab_size>2256": False,
    "vocab_size<=2256": True,
    "vocab_size<2256": False,
    "lr<0.01": True,
    "loss_tolerance>0": False,
    "dim=128": True,
    "seed>=-1": True,
    "fp8_all_gather=true": True,
    "fp8_all_gather=no": False,
    "checkpointing=full": True,
    "filter_fqns=wq+wk": True,
    "filter_fqns=none": False,
    "world_size=8": True,
    "world_size<8": False,
    "local_batch>=2": True,
    "local_batch=1": False,
    "id~*ac.full*": True,
    "id~fsdp2-*-f32": True,
    "id~ac.full": False,
    "ac.full": True,
    "hsdp": False,
    "target=reference": True,
    "target!=reference,torchtitan": False,
}


def test_what_terms_mean() -> None:
    assert {text: parse_selector(text).matches(CASE) for text in TERMS} == TERMS


def test_a_target_is_asked_for_by_its_first_names() -> None:
    case = parse_case_id("target.mine.llama3-single-bf16-v2048-b16")
    for text, matches in {"target=mine": True, "target=mine.llama3": True, "target=min,mine.llama": False}.items():
        assert parse_selector(text).matches(case) is matches
        assert parse_selector(text.replace("=", "!=")).matches(case) is not matches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=4", "selector 'tpp=4': unknown axis 'tpp'. Fix: did you mean tp"),
        ("recipe=rowwize", "did you mean rowwise"),
        ("tp=four", "axis 'tp' cannot be 'four'. Fix: write a number"),
        ("world_size=two", "axis 'world_size' cannot be 'two'. Fix: write a number"),
        ("world_siz=2", "did you mean world_size"),
        ("tp=0", "tp = 0"),
        ("tp>=four", "cannot be compared with 'four'"),
        ("lr<nan", "cannot be compared with 'nan'"),
        ("tp=", "axis 'tp' cannot be ''"),
        ("lr=nan", "lr = nan"),
        ("async_tp=maybe", "axis 'async_tp' cannot be 'maybe'"),
        ("recipe>=bf16", "axis 'recipe' has no order"),
        ("tp~4", "~ only works with id"),
        ("id=x", "unknown axis 'id'. Fix: write id~GLOB"),
        ("$$", "neither a condition nor part of an id"),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    with pytest.raises(HarnessError, match=re.escape(message)):
        parse_selector(text)


@given(st.from_type(Case), st.sampled_from(["tp", "recipe", "vocab_size", "lr", "seed", "dtype", "dp_shard"]))
def test_a_case_is_selected_by_its_own_values(case: Case, axis: str) -> None:
    value = axis_values(case)[axis]
    assert parse_selector(f"{axis}={value}").matches(case)
    assert not parse_selector(f"{axis}!={value}").matches(case)
    assert parse_selector(f"id~{case_id(case)}").matches(case)


@given(st.text(max_size=40))
def test_any_text_is_a_selector_or_a_clear_error(text: str) -> None:
    try:
        selector = parse_selector(text)
    except HarnessError:
        return
    selector.matches(CASE)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("tp=4", 4),
        ("lr=0.1", 0.1),
        ("async_tp=true", True),
        ("recipe=rowwise", "rowwise"),
        ("filter_fqns=wq,wk", ("wk", "wq")),
        ("filter_fqns=wq+wk", ("wk", "wq")),
        ("filter_fqns=none", ()),
    ],
)
def test_a_word_gives_an_axis_the_value_that_a_file_gives_it(word: str, value: object) -> None:
    name = word.partition("=")[0]
    assert read_assignments([word]) == {name: value}
    assert f"{option_of(name)}{'=' if 'set' in option_of(name) else ' '}{shown_value(value)}" == said(name, value)


def test_a_word_without_a_value_and_two_for_one_axis_are_refused() -> None:
    refused = ((["lr"], "lr has no value"), (["lr=1", "lr=2"], "lr is given twice"), (["lr=x"], "cannot be 'x'"))
    for words, text in refused:
        with pytest.raises(HarnessError, match=text):
            read_assignments(words, option="--set")


SYNONYMS = tomllib.loads((Path(axes.__file__).parent / "synonyms.toml").read_text())


@given(st.sampled_from([(axis, word) for axis, words in SYNONYMS["axes"].items() for word in words.split()]))
def test_every_word_of_another_tool_leads_to_an_axis_with_its_values(pair: tuple[str, str]) -> None:
    axis, word = pair
    assert axis in AXES and word not in AXES
    assert (
        f"{axis} (" in suggestion(word, AXES) and suggestion(f"--training.{word.replace('_', '-')}", AXES)[:3] == "did"
    )


@given(
    st.sampled_from(
        [
            (axis, value, word)
            for axis, words in SYNONYMS["values"].items()
            for value, others in words.items()
            for word in others.split()
        ]
    )
)
def test_every_word_for_a_value_leads_to_a_value_of_its_axis(found: tuple[str, str, str]) -> None:
    axis, value, word = found
    assert value in choices(axis) and word not in choices(axis)
    with pytest.raises(HarnessError, match=f"did you mean .*{re.escape(value)}"):
        read_value(axis, word)


@pytest.mark.parametrize(
    ("word", "known", "fix"),
    [
        ("tensor_parallel", AXES, "did you mean tp (a number of at least 1)?"),
        ("parallelism.context_parallel_degree", AXES, "did you mean cp (a number of at least 1)?"),
        ("--recompute-granularity", AXES, "did you mean checkpointing (none, full, selective_op, selective_layer)?"),
        ("enable_fsdp_float8_all_gather", AXES, "did you mean fp8_all_gather (true, false)?"),
        ("zero3", AXES, "did you mean dp_shard (a number of at least 1)?"),
        ("fp8", choices("recipe"), "did you mean tensorwise or rowwise?"),
        ("tensorwise-dynamic", choices("recipe"), "did you mean tensorwise?"),
        ("per-row", choices("recipe"), "did you mean rowwise?"),
        ("groupwise", choices("recipe"), "leave it out: group-wise scaling is out of scope: .*"),
        ("delayed scaling", choices("recipe"), "leave it out: delayed scaling is out of scope: .*"),
    ],
)
def test_words_of_other_tools(word: str, known: Collection[object], fix: str) -> None:
    assert re.fullmatch(fix if fix.startswith("leave") else re.escape(fix), suggestion(word, known))


def test_a_long_list_is_a_command() -> None:
    assert suggestion("zzz", ["one", "two"]) == "use one of one, two."
    assert suggestion("zzz", ["one", "two"], listed="bug list") == "see `bug list`."
