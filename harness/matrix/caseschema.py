"""The JSON schema of case files, for editors: made from the axes. What it cannot say, `casefile.py` checks."""

from __future__ import annotations

from typing import Any

from harness.matrix.axes import AXES, axis_schema

FILE_NAME = "case.schema.json"


def case_file_schema() -> dict[str, Any]:
    """The schema of a case file: every axis with its type, limits, choices, meaning and default."""
    axes = _table({name: {"$ref": f"#/$defs/{name}"} for name in AXES})
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
                "properties": {name: _list({"$ref": f"#/$defs/{name}"}) for name in AXES},
                "additionalProperties": _list({"$ref": "#/$defs/axes", "minProperties": 1}),
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
        "$defs": {"axes": axes, **{name: axis_schema(name) for name in AXES}},
    }


def _table(properties: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **rest}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}
