"""Tolerances: where every allowed distance between a loss and its golden comes from.

People write `golden/tolerances.toml` (a number and a margin); the tool writes `golden/evidence/loss_vs_golden.json`
(the distances that were measured). A number that its evidence does not carry is an error: below the noise it would
fail good runs, far above it would pass bad ones. This file does not know how a loss is judged (`checks/`) or how the
samples are measured (`workflow.py`).

    [loss_vs_golden.tiny-tensorwise-float32]
    allowed = [0.001, 0.002, 0.004, 0.006, 0.008]    # nats, one a step; or one number for every step
    margin = 3.0                                     # the most that `allowed` may be above the measured noise

Public names: `Tolerance`, `tolerance_for`, `validate_tolerances`, `tolerance_key`, `noise`, `fit`, `Evidence`,
`Sample`, `read_evidence`, `write_evidence`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.measured.sealed import Sealed, read_sealed, write_sealed
from harness.spec.case import Case, ModelShape
from harness.spec.gemms import OUTPUT_FQN, is_converted

SCHEMA = 1
LOSS_VS_GOLDEN = "loss_vs_golden"  # |loss - golden| in nats
PARITY = "parity"  # largest relative distance of a gradient to that of the solo witness
CHECKS = (LOSS_VS_GOLDEN, PARITY)
TABLE_FILE = "golden/tolerances.toml"
MEASURE = "run `fp8-harness tolerance measure`"

# A step counts as measured when that many seeds and layouts reached it: the largest of 8 independent samples of a
# quantity lies below its median with a chance of 1 in 256. Layouts of one kind differ less than seeds: two show whether
# the kind is one.
MIN_SEEDS = 8
MIN_LAYOUTS = 2

# A margin above this is no longer about noise. At 1.0 every new seed that is a little noisier would fail.
MIN_MARGIN, MAX_MARGIN = 1.1, 5.0

# Below this a number need not be close to the noise: no fault is so small. The smallest planted one that changes a
# number at all changes a gradient by 1e-4.
EXACT = 1e-8


class ToleranceMissing(HarnessError):
    """No number is allowed for this kind of case, or not for this many steps."""


class ToleranceUnfounded(HarnessError):
    """A number that its evidence does not carry, or a table or evidence file that cannot be read."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured run: its distance to the witness of the check, per step, in the unit of the check."""

    key: str  # `tolerance_key` or `parity_key` of the case
    case_id: str
    layout: str  # layout part of the case id
    seed: int
    per_step: tuple[float, ...]
    environment: str = "default"  # what was limited: "ATEN_CPU_CAPABILITY=avx2", "OMP_NUM_THREADS=1", …


class Evidence(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every sample that the tolerances rest on. `software` and `device` say what they were measured with."""

    samples: tuple[Sample, ...]
    software: dict[str, str]
    device: str
    command: str
    created: str  # UTC, ISO 8601


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """The distances allowed to one case, one number a step. `evidence` says in words what they rest on."""

    name: str  # check that uses it
    key: str
    per_step: tuple[float, ...]
    margin: float | None  # None when the case itself names the number
    evidence: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What people write for one key."""

    allowed: float | tuple[float, ...]
    margin: float


def tolerance_key(case: Case) -> str:
    """Cases of one key share a tolerance: same model, recipe, output layer in FP8 or not, dtype.

    A changed preset is a model of its own. An output layer in FP8 rounds the logits themselves and more than doubles
    the noise.
    """
    model = case.model
    changed = [
        f"_{name}{value}" for name in ModelShape.__struct_fields__ if (value := getattr(model, name)) is not None
    ]
    head = "-head" if is_converted(case, OUTPUT_FQN) else ""
    return f"{model.preset}{''.join(changed)}-{case.float8.recipe}{head}-{case.train.dtype}"


def parity_key(case: Case) -> str:
    """Cases of one key are equally close to their solo witness.

    In float64 every layout is (`exact`). Otherwise layouts that add up in the order of the witness are (`ordered`); the
    others differ in the last bit, which flips the rounding of some float8 value within a step or two.
    """
    if case.train.dtype == "float64":
        return "exact"
    in_order = case.layout.tp == 1 and case.layout.dp_replicate == 1
    ordered = in_order and case.compile != "inductor"  # generated code rounds elsewhere
    return "ordered" if ordered else f"{case.float8.recipe}-{case.train.dtype}"


def tolerance_for(case: Case, root: Path) -> Tolerance:
    """How far the losses of a case may be from its golden, in nats; its own `loss_tolerance` wins over the table.

    Raises `ToleranceMissing` when nothing was measured for its kind or for as many steps (noise grows with every
    step, so nothing is extrapolated), and `ToleranceUnfounded` when the number does not fit its evidence.
    """
    key, steps = tolerance_key(case), case.train.steps
    own = case.checks.loss_tolerance
    if own is not None:
        words = "loss_tolerance of case"
        return Tolerance(name=LOSS_VS_GOLDEN, key=key, per_step=(own,) * steps, margin=None, evidence=words)
    return _tolerance(LOSS_VS_GOLDEN, key, steps, root)


def parity_tolerance_for(case: Case, root: Path) -> Tolerance:
    """How far any gradient of a case may be from that of its solo witness, relative to its norm. Raises as above."""
    return _tolerance(PARITY, parity_key(case), case.train.steps, root)


def _tolerance(check: str, key: str, steps: int, root: Path) -> Tolerance:
    entry = _read_table(root).get(check, {}).get(key)
    way_out = f"{MEASURE} with such cases, or set `loss_tolerance` in the case."
    if entry is None:
        raise ToleranceMissing(f"there is no {check} tolerance for {key}.", where=TABLE_FILE, fix=way_out)
    samples = [sample for sample in read_evidence(root, check).samples if sample.key == key]
    problems = _problems(key, entry, samples)
    if problems:
        raise ToleranceUnfounded("; ".join(problems) + ".", where=TABLE_FILE, fix=f"{MEASURE} and adapt the number.")
    per_step = _per_step(entry, measured_steps(samples))
    if len(per_step) < steps:
        what = f"the tolerance of {key} covers {len(per_step)} steps, the case trains {steps}."
        raise ToleranceMissing(what, where=TABLE_FILE, fix=way_out)
    words = f"{len(samples)} samples, {len({sample.seed for sample in samples})} seeds"
    return Tolerance(name=check, key=key, per_step=per_step[:steps], margin=entry.margin, evidence=words)


def validate_tolerances(root: Path) -> None:
    """Raises `ToleranceUnfounded` naming every number of the table that its evidence does not carry."""
    table = _read_table(root)
    if not any(table.values()):
        raise ToleranceUnfounded("holds no tolerance.", where=TABLE_FILE, fix=f"{MEASURE} and write the numbers.")
    problems = [problem for check, entries in table.items() for problem in _unfounded(check, entries, root)]
    if problems:
        raise ToleranceUnfounded("; ".join(problems) + ".", where=TABLE_FILE, fix=f"{MEASURE} and adapt the numbers.")


def _unfounded(check: str, entries: dict[str, Entry], root: Path) -> list[str]:
    samples = read_evidence(root, check).samples
    return [
        problem
        for key, entry in entries.items()
        for problem in _problems(key, entry, [sample for sample in samples if sample.key == key])
    ]


def measured_steps(samples: Sequence[Sample]) -> int:
    """The last step that at least `MIN_SEEDS` seeds and `MIN_LAYOUTS` layouts reached; 0 when there is none."""
    for steps in range(max((len(sample.per_step) for sample in samples), default=0), 0, -1):
        reached = [sample for sample in samples if len(sample.per_step) >= steps]
        seeds, layouts = {sample.seed for sample in reached}, {sample.layout for sample in reached}
        if len(seeds) >= MIN_SEEDS and len(layouts) >= MIN_LAYOUTS:
            return steps
    return 0


def noise(samples: Sequence[Sample]) -> tuple[float, ...]:
    """The largest distance measured up to each step: never falling, as errors of training only add up."""
    peaks = [
        max(sample.per_step[step] for sample in samples if len(sample.per_step) > step)
        for step in range(measured_steps(samples))
    ]
    return tuple(itertools.accumulate(peaks, max))


def fit(samples: Sequence[Sample], margin: float) -> tuple[float, ...]:
    """The numbers to write for these samples: noise times margin, rounded down to three digits, one a step."""
    return tuple(_round_down(value * margin) for value in noise(samples))


def evidence_path(root: Path, check: str) -> Path:
    """Where the evidence of a check is stored."""
    return root / "golden" / "evidence" / f"{check}.json"


def read_evidence(root: Path, check: str = LOSS_VS_GOLDEN) -> Evidence:
    """The measured samples. Raises `ToleranceUnfounded` when there are none or the file is damaged."""
    path, way_out = evidence_path(root, check), f"restore it or {MEASURE}."
    try:
        evidence = read_sealed(path, Evidence, schema=SCHEMA, damaged=ToleranceUnfounded, fix=way_out)
    except OSError as error:
        raise ToleranceUnfounded(f"cannot be read: {error.strerror}.", where=str(path), fix=way_out) from error
    return evidence


def write_evidence(root: Path, evidence: Evidence, check: str = LOSS_VS_GOLDEN) -> Path:
    """Store the samples, sorted, and return the path. Refuses distances that are negative or not finite."""
    for sample in evidence.samples:
        if not sample.per_step or not all(math.isfinite(value) and value >= 0 for value in sample.per_step):
            raise ToleranceUnfounded(f"measured {sample.per_step}, which is no distance.", where=sample.case_id)
    ordered = sorted(evidence.samples, key=lambda item: (item.key, item.seed, item.case_id, item.environment))
    path = evidence_path(root, check)
    write_sealed(path, msgspec.structs.replace(evidence, samples=tuple(ordered)))
    return path


def _read_table(root: Path) -> dict[str, dict[str, Entry]]:
    path = root / TABLE_FILE
    try:
        table = msgspec.toml.decode(path.read_bytes(), type=dict[str, dict[str, Entry]])
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ToleranceUnfounded(f"is not readable ({error}).", where=str(path), fix="mend the file.") from error
    except FileNotFoundError:
        return {}  # nothing is allowed yet: every key is missing
    except OSError as error:
        raise ToleranceUnfounded(f"cannot be read: {error.strerror}.", where=str(path), fix="restore it.") from error
    unknown = sorted(set(table) - set(CHECKS))
    if unknown:
        use = " or ".join(f"[{check}.KEY]" for check in CHECKS)
        raise ToleranceUnfounded(f"no check is called {unknown[0]!r}.", where=str(path), fix=f"use {use}.")
    return table


def _problems(key: str, entry: Entry, samples: Sequence[Sample]) -> list[str]:
    """Why the evidence does not carry an entry; empty when it does."""
    if not MIN_MARGIN <= entry.margin <= MAX_MARGIN:  # also refuses NaN
        return [f"{key}: margin {entry.margin} is not between {MIN_MARGIN} and {MAX_MARGIN}"]
    floor = noise(samples)
    if not floor:
        return [f"{key}: no step was measured with {MIN_SEEDS} seeds and {MIN_LAYOUTS} layouts"]
    if entry.allowed == ():
        return [f"{key}: allows nothing: the list is empty"]
    if isinstance(entry.allowed, tuple) and len(entry.allowed) > len(floor):
        return [f"{key}: names {len(entry.allowed)} steps, the evidence covers {len(floor)}"]
    if isinstance(entry.allowed, float):
        floor = (floor[-1],)
    return [problem for step, low in enumerate(floor, 1) for problem in _off(key, entry, step, low)]


def _off(key: str, entry: Entry, step: int, low: float) -> list[str]:
    allowed = _per_step(entry, step)
    if len(allowed) < step:
        return []
    value, high = allowed[step - 1], low * entry.margin
    at = f"{key}, step {step}" if isinstance(entry.allowed, tuple) else key
    if not value >= low:
        return [f"{at}: {value:g} is below the measured noise {low:g}"]
    if not value <= max(high, EXACT):
        return [f"{at}: {value:g} is above {high:g}, the noise {low:g} times the margin {entry.margin:g}"]
    return []


def _per_step(entry: Entry, steps: int) -> tuple[float, ...]:
    return entry.allowed if isinstance(entry.allowed, tuple) else (entry.allowed,) * steps


def _round_down(value: float) -> float:
    """The largest number of three digits that is not above `value`."""
    if value <= 0:
        return 0.0
    exponent = math.floor(math.log10(value)) - 2
    digits = math.floor(value / 10.0**exponent)
    rounded = float(f"{digits}e{exponent}")
    return rounded if rounded <= value else float(f"{digits - 1}e{exponent}")
