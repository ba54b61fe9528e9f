"""Case files: TOML <-> cases and matrix blocks.

Owns the format of `cases/*.toml` and its errors. `space.py` expands matrix blocks and `tier.py` selects their cells.

    description = "..."
    [select]                     # optional
    strength = 2                 # 2 or 3: every feasible pair or triple of values is covered; "full": every cell
    max_world_size = 8           # optional: leave out cases with more ranks
    [base]                       # optional: values shared by all blocks, and by cases that are given by axes
    steps = 5
    [[matrix]]
    name = "layouts"
    base = {dtype = "float32"}   # optional: values of this block
    max_world_size = 4           # optional: a smaller limit for this block
    pair_only = {tp = ["recipe"]} # optional: tp is combined with recipe only; its other pairs are covered elsewhere
    [matrix.axes]
    tp = [1, 2]                                                       # an axis and its values
    gather = [{fp8_all_gather = false}, {fp8_all_gather = true}]      # a named group of axes that vary together
    [[case]]                     # always included, before the matrix
    id = "tp2-rowwise-v2048-f32" # or: axes = {tp = 2, recipe = "rowwise"}
"""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.errors import HarnessError
from harness.hints import explain_case
from harness.matrix import axes as matrix_axes
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.rules import changes, exclusions
from harness.matrix.synonyms import meanings
from harness.matrix.tomlfile import KeyPath, TomlFile, parse_toml, read_toml_file

Strength = Literal[2, 3, "full"]


class AxisGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One factor of a matrix: each of its values sets one axis, or several axes that vary together."""

    name: str
    values: tuple[dict[str, object], ...]

    def label(self, index: int) -> str:
        """Return the name of a value in reports: `tp=2`, or `dp_replicate=2,dp_shard=2`."""
        return (
            ",".join(f"{name}={matrix_axes.shown_value(value)}" for name, value in self.values[index].items()) or "{}"
        )


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One `[[matrix]]`: its factors, and the values that all its cells share."""

    name: str
    base: dict[str, object]
    groups: tuple[AxisGroup, ...]
    max_world_size: int | None = None  # of its cells; the file's limit holds as well
    pair_only: dict[str, tuple[str, ...]] = {}  # for some groups, by name, the only ones they are combined with

    def combines(self, names: Iterable[str]) -> bool:
        """Return True if values of these groups have to be covered together in this block."""
        members = set(names)
        return all(members - {name} <= set(self.pair_only.get(name, members)) for name in members)


class CaseFile(msgspec.Struct, frozen=True, kw_only=True):
    """A tier, or a file with single cases. `cases` are always included, in the order of the file."""

    name: str
    where: str
    description: str = ""
    strength: Strength = 2
    max_world_size: int | None = None
    blocks: tuple[Block, ...] = ()
    cases: tuple[Case, ...] = ()


def read_case_file(path: Path) -> CaseFile:
    """Return the case file at `path`. Raises HarnessError with file and line for anything invalid."""
    return _case_file(read_toml_file(path), name=path.stem)


def parse_case_file(text: str, *, where: str) -> CaseFile:
    """Return the case file in `text`; `where` is its name in errors."""
    return _case_file(parse_toml(text, where=where), name=Path(where).stem)


def write_case(case: Case, *, schema: str | None, command: str) -> str:
    """Return the text of a case file with this case: its own axes, and all others as comments with their defaults.

    `schema` is where editors find the schema, if they can; `command` runs the file.
    """
    values, own = matrix_axes.axis_values(case), matrix_axes.own_axes(case)
    chosen = [_assignment(name, value) for name, value in own.items()]
    shown = {name: matrix_axes.DECLARED[name].example if value is None else value for name, value in values.items()}
    others = [f"# {_assignment(name, value)}" for name, value in shown.items() if name not in own]
    head = [f"#:schema {schema}"] if schema is not None else []
    head += [f"# Run it by `{command}`.", f"description = {_toml(case_id(case))}"]
    rest = "# Every other axis has its default. To change one, remove the # before it."
    return "\n".join([*head, "", "[[case]]", "[case.axes]", *chosen, "", rest, *others, ""])


def _assignment(name: str, value: object) -> str:
    one_of = (
        f" ({', '.join(map(str, matrix_axes.choices(name)))})"
        if matrix_axes.axis_type(name) is str and matrix_axes.choices(name)
        else ""
    )
    return f"{f'{name} = {_toml(value)}':<34} # {matrix_axes.DECLARED[name].meaning}{one_of}"


def _toml(value: object) -> str:
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _case_file(toml: TomlFile, *, name: str) -> CaseFile:
    data = toml.check_keys(table=toml.data, known=("description", "select", "base", "matrix", "case"))
    description = data.get("description", "")
    if not isinstance(description, str):
        raise toml.error("description", what="description must be a string.")
    strength, max_world_size = _select(toml, data.get("select", {}))
    base = _axes(toml, data.get("base", {}), path=("base",))
    blocks, cases = _blocks(toml, base), _cases(toml, base)
    if not blocks and not cases:
        raise toml.error(what="this file has no cases.", fix="add a [[case]] with an id or axes, or a [[matrix]].")
    return CaseFile(
        name=name,
        where=toml.where,
        description=description,
        strength=strength,
        max_world_size=max_world_size,
        blocks=blocks,
        cases=cases,
    )


def _cases(toml: TomlFile, base: dict[str, object]) -> tuple[Case, ...]:
    cases: dict[str, Case] = {}
    for index, table in enumerate(toml.tables("case")):
        case = case_of_table(toml, table, base, path=("case", index))
        if case_id(case) in cases:
            raise toml.error("case", index, what=f"{case_id(case)} is here twice.", fix="remove one of them.")
        cases[case_id(case)] = case
    return tuple(cases.values())


def _select(toml: TomlFile, table: object) -> tuple[Strength, int | None]:
    known = toml.check_keys("select", table=table, known=("strength", "max_world_size"))
    strength = known.get("strength", 2)
    if isinstance(strength, bool) or strength not in (2, 3, "full"):
        raise toml.error("select", "strength", what=f"strength = {strength!r}.", fix='use 2, 3 or "full".')
    return strength, _world_limit(toml, known, path=("select",))


def _world_limit(toml: TomlFile, table: dict[str, Any], *, path: KeyPath) -> int | None:
    limit = table.get("max_world_size")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise toml.error(*path, "max_world_size", what=f"max_world_size = {limit!r}.", fix="use a number from 1.")
    return limit


def _blocks(toml: TomlFile, base: dict[str, object]) -> tuple[Block, ...]:
    blocks = tuple(_block(toml, table, base, index) for index, table in enumerate(toml.tables("matrix")))
    toml.check_distinct([block.name for block in blocks], "matrix", noun="matrices")
    return blocks


def _block(toml: TomlFile, table: object, base: dict[str, object], index: int) -> Block:
    path: KeyPath = ("matrix", index)
    known = toml.check_keys(*path, table=table, known=("name", "base", "axes", "max_world_size", "pair_only"))
    name = known.get("name")
    if not isinstance(name, str) or not name:
        raise toml.error(*path, what="a matrix needs a name.", fix='add name = "...".')
    axes = known.get("axes")
    if not isinstance(axes, dict) or not axes:
        raise toml.error(*path, what=f"matrix '{name}' has no axes.", fix="add [matrix.axes] with a list per axis.")
    own_base = _axes(toml, known.get("base", {}), path=(*path, "base"))
    groups = tuple(_group(toml, key, values, path=(*path, "axes", key)) for key, values in axes.items())
    _check_disjoint(toml, groups, path=(*path, "axes"))
    return Block(
        name=name,
        base={**base, **own_base},
        groups=groups,
        max_world_size=_world_limit(toml, known, path=path),
        pair_only=_pair_only(toml, known.get("pair_only", {}), groups, path=(*path, "pair_only")),
    )


def _pair_only(
    toml: TomlFile, table: object, groups: tuple[AxisGroup, ...], *, path: KeyPath
) -> dict[str, tuple[str, ...]]:
    names = [group.name for group in groups]
    known = toml.check_keys(*path, table=table, known=names)
    for name, others in known.items():
        if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
            raise toml.error(*path, name, what=f"'{name}' needs a list of axes.", fix=f'write {name} = ["..."].')
        for other in others:
            if other not in names:
                raise toml.error(*path, name, what=f"unknown axis '{other}'.", fix=matrix_axes.suggestion(other, names))
    return {name: tuple(others) for name, others in known.items()}


def _group(toml: TomlFile, name: str, values: object, *, path: KeyPath) -> AxisGroup:
    if not isinstance(values, list) or not values:
        raise toml.error(*path, what=f"axis '{name}' needs a list of values.", fix=f"write {name} = [...].")
    if name in matrix_axes.AXES:
        read = tuple(_axes(toml, {name: value}, path=path[:-1]) for value in values)
    elif all(isinstance(value, dict) for value in values):
        read = tuple(_axes(toml, value, path=path) for value in values)
    else:
        near = meanings(name) or difflib.get_close_matches(name, matrix_axes.AXES, n=1)
        fix = (
            matrix_axes.suggestion(name, matrix_axes.AXES)
            if near
            else f"write {name} = [{{}}, {{tp = 2}}]: a table of axes for each value."
        )
        raise toml.error(*path, what=f"unknown axis '{name}'.", fix=fix)
    for position, value in enumerate(read):
        if value in read[:position]:
            raise toml.error(*path, what=f"axis '{name}' lists {value} twice.", fix="remove one of them.")
    return AxisGroup(name=name, values=read)


def _check_disjoint(toml: TomlFile, groups: tuple[AxisGroup, ...], *, path: KeyPath) -> None:
    owner: dict[str, str] = {}
    for group in groups:
        for name in sorted({name for value in group.values for name in value}):
            if owner.setdefault(name, group.name) != group.name:
                what = f"axis '{name}' is set by both '{owner[name]}' and '{group.name}'."
                raise toml.error(*path, group.name, what=what, fix="keep it in one of them.")


def _axes(toml: TomlFile, table: object, *, path: KeyPath) -> dict[str, object]:
    known: dict[str, object] = {}
    for name, value in toml.check_keys(*path, table=table, known=matrix_axes.AXES).items():
        try:
            known[name] = matrix_axes.checked_value(name, value)
        except HarnessError as error:
            raise toml.error(*path, name, what=error.what, fix=error.fix) from error
    return known


def case_of_table(toml: TomlFile, table: object, base: dict[str, object], *, path: KeyPath) -> Case:
    """Return the case of a table with an `id`, or with `axes` that add to those of `base`."""
    known = toml.check_keys(*path, table=table, known=("id", "axes"))
    if len(known) != 1:
        fix = "remove one of them." if known else 'add id = "..." or axes = {...}.'
        raise toml.error(*path, what="a case needs either an id or axes.", fix=fix)
    by_id = "id" in known
    case = _case_by_id(toml, known["id"], path=path) if by_id else _case_by_axes(toml, known["axes"], base, path=path)
    for rule in exclusions(case):
        given = {} if by_id else {**base, **known["axes"]}
        asked = changes([name for name in rule.axes if name in given], given)
        fix = f"change {asked}." if asked else f"see `{explain_case(case_id(case))}`."
        raise toml.error(*path, what=f"rule {rule.name} excludes {case_id(case)}: {rule.reason}.", fix=fix)
    return case


def _case_by_id(toml: TomlFile, text: Any, *, path: KeyPath) -> Case:
    if not isinstance(text, str):
        raise toml.error(*path, "id", what="id must be a string.", fix='write id = "tp2-tensorwise-v2048-b16".')
    try:
        return parse_case_id(text)
    except HarnessError as error:
        raise toml.error(*path, "id", what=f"case id '{text}': {error.what}", fix=error.fix) from error


def _case_by_axes(toml: TomlFile, table: object, base: dict[str, object], *, path: KeyPath) -> Case:
    own = _axes(toml, table, path=(*path, "axes"))
    try:
        case = matrix_axes.case_from_axes({**base, **own})
        ignored = [name for name in matrix_axes.ignored_axes({**base, **own}) if name in own]
    except HarnessError as error:
        raise toml.error(*path, "axes", what=error.what, fix=error.fix) from error
    if ignored:
        what = f"this case ignores {', '.join(ignored)}."
        raise toml.error(*path, "axes", ignored[0], what=what, fix="remove it, or change the option that disables it.")
    return case


FILE_NAME = "case.schema.json"


def case_file_schema() -> dict[str, Any]:
    """Return the schema of a case file: every axis with its type, limits, choices, meaning and default."""
    axes = _table({name: {"$ref": f"#/$defs/{name}"} for name in matrix_axes.AXES})
    limit = {"type": "integer", "minimum": 1, "description": "leave out cases with more ranks"}
    names = {"type": "array", "items": {"type": "string"}}
    matrix = _table(
        {
            "name": {"type": "string", "minLength": 1},
            "base": {"$ref": "#/$defs/axes", "description": "values of this block"},
            "max_world_size": limit,
            "pair_only": {"type": "object", "additionalProperties": names},
            "axes": {
                "type": "object",
                "minProperties": 1,
                "description": "an axis with its values, or a named group of axes that vary together",
                "properties": {name: _list({"$ref": f"#/$defs/{name}"}) for name in matrix_axes.AXES},
                "additionalProperties": _list({"$ref": "#/$defs/axes"}),
            },
        },
        required=["name", "axes"],
    )
    case = {
        **_table({"id": {"type": "string"}, "axes": {"$ref": "#/$defs/axes"}}),
        "oneOf": [{"required": ["id"]}, {"required": ["axes"]}],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cases of fp8-harness",
        **_table(
            {
                "description": {"type": "string"},
                "select": _table({"strength": {"enum": [2, 3, "full"]}, "max_world_size": limit}),
                "base": {"$ref": "#/$defs/axes", "description": "values shared by all blocks"},
                "matrix": {"type": "array", "items": matrix},
                "case": {"type": "array", "items": case},
            }
        ),
        "$defs": {"axes": axes, **{name: matrix_axes.axis_schema(name) for name in matrix_axes.AXES}},
    }


def _table(properties: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **rest}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}
