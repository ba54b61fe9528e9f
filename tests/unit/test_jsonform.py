"""JSON with numbers that JSON does not have: what is written is what is read, bit by bit."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.jsonform import compact, from_json, to_json


class Thing(msgspec.Struct, frozen=True):
    """A value with everything that results have."""

    number: float
    numbers: tuple[float, ...]
    named: dict[str, float]
    maybe: float | None
    count: int
    text: str | None


texts = st.text() | st.sampled_from(["NaN", "nan", "null", "None", "Infinity", "1.5", "true", ""])
things = st.builds(
    Thing,
    number=st.floats(),
    numbers=st.lists(st.floats()).map(tuple),
    named=st.dictionaries(texts, st.floats(), max_size=3),
    maybe=st.none() | st.floats(),
    count=st.integers(-(2**53), 2**53),
    text=st.none() | texts,
)


def bits(value: object) -> object:
    """The value with every float spelled so that NaN equals NaN and -0.0 differs from 0.0."""
    match value:
        case float():
            return value.hex()
        case dict():
            return {key: bits(item) for key, item in value.items()}
        case list() | tuple():
            return [bits(item) for item in value]
        case _:
            return value


@given(things, st.sampled_from([0, 2]))
def test_what_is_written_is_read(thing: Thing, indent: int) -> None:
    found = from_json(to_json(thing, indent=indent), Thing)
    assert bits(msgspec.to_builtins(found)) == bits(msgspec.to_builtins(thing))


scalars = st.text(max_size=99) | st.integers() | st.none()
plain = st.recursive(scalars, lambda some: st.lists(some, min_size=3) | st.dictionaries(texts, some), max_leaves=9)


@given(plain)
def test_compact_json_is_the_same_value(value: object) -> None:
    assert json.loads(compact(value)) == value


@given(things)
def test_it_is_strict_json_on_one_line(thing: Thing) -> None:
    text = to_json(thing)
    assert b"\n" not in text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


def test_not_a_number_is_never_null() -> None:
    thing = Thing(math.nan, (math.inf, -math.inf), {}, math.nan, 1, None)
    plain = json.loads(to_json(thing))
    assert (plain["number"], plain["numbers"], plain["maybe"]) == ("NaN", ["Infinity", "-Infinity"], "NaN")
    assert plain["text"] is None


def test_null_is_no_number() -> None:
    text = to_json(Thing(1.0, (), {}, None, 1, None)).replace(b'"number":1.0', b'"number":null')
    with pytest.raises(msgspec.ValidationError):
        from_json(text, Thing)
