"""Curves of runs as text: golden files of torchtitan, also without norms or comments, and logs of runs.

`evidence/golden.py` writes them, as `curve_text`. A line of a log is `step:  1  loss:  8.02397  grad_norm: …`.
"""

import math
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes, own_values
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import case_id, layout_id, parse_case_id

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
_ROW = re.compile(rf"(\d+)\s+({_NUMBER})(?:\s+({_NUMBER}))?\s*")
_LOGGED = re.compile(rf"(?<!validate )\bstep:\s*(\d+)\s+loss:\s*({_NUMBER})(?:.*?\bgrad_norm:\s*({_NUMBER}))?")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_SAID = re.compile(r"#\s*([\w-]+):\s*(.+)")
_MESH_WORD = re.compile(r"_(?:fsdp|hsdp|ddp|dp|tp|cp|pp|ep)\d+(?:x\d+)?(?=_|$)")


class Number(msgspec.Struct, frozen=True):
    """A number as it was printed. `half`: half a unit of its last digit."""

    value: float
    half: float = 0.0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One step: loss in nats; gradient norm before clipping, None where the file has none."""

    step: int
    loss: Number
    grad_norm: Number | None = None


class TextCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one run in order, and what the comments of its file say: `config`, `ngpu`, `parallelism`."""

    name: str
    points: tuple[Point, ...]
    said: dict[str, str] = {}

    @property
    def case(self) -> Case | None:
        """The case of the run; None for a job that is none of ours."""
        try:
            return parse_case_id(self.said.get("config", ""))
        except HarnessError:
            return None

    @property
    def job(self) -> str:
        """What is the same in all its layouts: the case on one rank, or the name of a config; empty if not said."""
        case, config = self.case, self.said.get("config", "")
        return _MESH_WORD.sub("", config) if case is None else job_of(case)


def job_of(case: Case) -> str:
    """Return the case on one rank: what runs of one model, seed and recipe have in common."""
    return case_id(case_from_axes({**own_values(case), **Layout().mesh, "tp_styles": "plain"}))


def read_curve(path: Path) -> TextCurve:
    """Read a golden file of torchtitan or the log of a run. HarnessError for anything else."""
    try:
        lines = _COLOR.sub("", path.read_text(encoding="utf-8")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"cannot be read: {error}.", where=str(path), fix="give a golden file or a log.") from error
    points: dict[int, Point] = {}
    for number, line in enumerate(lines, 1):
        point = _point(line)
        if point is not None and points.setdefault(point.step, point) != point:  # every rank may print the same line
            what = f"has step {point.step} a second time, with other numbers."
            raise HarnessError(what, where=f"{path}:{number}", fix="give the lines of one run.")
    if not points:
        what = "has no step: neither lines of a golden (`1 8.02 1.59`) nor of a log (`step: 1 loss: 8.02`)."
        raise HarnessError(what, where=str(path), fix="give a golden file or a log.")
    said = {match[1]: match[2].strip() for line in lines if (match := _SAID.fullmatch(line.strip()))}
    return TextCurve(name=str(path), points=tuple(points[step] for step in sorted(points)), said=said)


def _point(line: str) -> Point | None:
    match = _ROW.fullmatch(line.strip()) or _LOGGED.search(line)
    if match is None:
        return None
    return Point(step=int(match[1]), loss=_number(match[2]), grad_norm=_number(match[3]) if match[3] else None)


def _number(text: str) -> Number:
    mantissa, _, exponent = text.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return Number(float(text), 0.5 * 10.0 ** (int(exponent or 0) - digits))


def curve_of(name: str, losses: Sequence[float], grad_norms: Sequence[float], said: dict[str, str]) -> TextCurve:
    steps = enumerate(zip_longest(losses, map(Number, grad_norms)), 1)
    points = tuple(Point(step=step, loss=Number(loss), grad_norm=norm) for step, (loss, norm) in steps)
    return TextCurve(name=name, points=points, said=said)


def curve_of_case(name: str, losses: Sequence[float], grad_norms: Sequence[float]) -> TextCurve:
    """Return the curve of a run of the case with this id."""
    return curve_of(layout_id(parse_case_id(name).layout), losses, grad_norms, {"config": name})
