"""Tolerances: the allowed distance of a loss to its golden and of a gradient to its reference, and their evidence.

People write `golden/tolerances.toml` (a number and a margin); the tool writes `golden/evidence/<check>.json` (measured
distances). A number that its evidence does not support is an error: below the noise it would fail good runs, far above
it would pass bad ones.

    [loss_vs_golden.tiny-tensorwise-float32]
    allowed = [0.001, 0.002, 0.004, 0.006, 0.008]    # nats, one a step; or one number for every step
    margin = 3.0                                     # `allowed` may be at most this factor above the measured noise
"""

import itertools
import math
from collections.abc import Sequence
from decimal import ROUND_DOWN, Context
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.evidence.sealed import Missing, Sealed, own_root, read_sealed, write_sealed
from harness.hints import MEASURE_TOLERANCES
from harness.matrix.axes import DECLARED, DEFAULTS, own_values
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.linears import OUTPUT_FQN, is_converted
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, activations_differ, clips_by_a_rounded_norm, sums_in_order
from harness.promises import Limit
from harness.registry import REFERENCE
from harness.sources import PACKAGES, holds_for, installed_versions

LOSS_VS_GOLDEN = "loss_vs_golden"  # |loss - golden| in nats
PARITY = "parity"  # largest relative distance of a gradient to that of the single-rank reference
CHECKS = (LOSS_VS_GOLDEN, PARITY)
TABLE_FILE = "golden/tolerances.toml"
MEASURE = f"run `{MEASURE_TOLERANCES}`"
NONE_DERIVED = "was measured for cases like this, and the BF16 runs to derive one from did not finish"

# A step counts as measured when this many seeds and layouts reached it. The largest of 8 independent samples is below
# the median of the quantity with a probability of 1 in 256. Layouts of one key differ less than seeds: two of them
# show whether they belong to one key.
MIN_SEEDS = 8
MIN_LAYOUTS = 2

MIN_MARGIN, MAX_MARGIN = Limit("tolerances.least_margin"), Limit("tolerances.largest_margin")
MAX_SPREAD = Limit("tolerances.spread")
EXACT = Limit("tolerances.exact")  # a number below it need not be close to the noise

# Parity keys of runs that round nothing differently: their last number holds for every later step.
EVERY_LAYOUT, SAME_ORDER = "exact", "ordered"
OF_EVERY_MODEL = (EVERY_LAYOUT, SAME_ORDER)


class ToleranceMissing(HarnessError):
    """The table has no number for this kind of case, or not for this many steps."""


class ToleranceUnfounded(HarnessError):
    """A number that its evidence does not support or that has none, or a table that cannot be read."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured run: its distance to the reference of the check at every step, in the unit of the check."""

    key: str  # `tolerance_key` or `parity_key` of the case
    case_id: str
    layout: str  # layout part of the case id
    seed: int
    per_step: tuple[float, ...]
    environment: str = "default"  # what was set: "ATEN_CPU_CAPABILITY=avx2", "OMP_NUM_THREADS=1", …


class Evidence(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The samples that support the tolerances of a check, and the software and device they were measured with."""

    samples: tuple[Sample, ...]
    software: dict[str, str]
    device: str
    command: str
    created: str  # UTC, ISO 8601


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """The allowed distances of one case, one number a step. `evidence` says what supports them."""

    name: str  # of the check that uses it
    key: str
    per_step: tuple[float, ...]
    evidence: str
    derived: bool = False  # from runs of the case's own model, because none was measured


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allowed: float | tuple[float, ...]
    margin: float


def tolerance_key(case: Case) -> str:
    """Cases with the same key share a tolerance: same model, learning rate, recipe, dtype, and output layer in FP8.

    An output layer in FP8 rounds the logits themselves and more than doubles the noise.
    """
    head = "-head" if is_converted(case, OUTPUT_FQN) else ""
    return f"{_training(case)}-{_recipe(case)}{head}-{case.train.dtype}"


def _recipe(case: Case) -> str:
    return "+".join((case.float8.recipe, *case.float8.casts))


def parity_key(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> str:
    """Return a key: cases with the same key are equally close to their single-rank reference.

    `exact`: every layout in float64. `ordered`: layouts that sum in the order of one rank. These two hold for any model
    and any number of steps, because no rounding differs. All others differ in the last bit, by model, learning rate,
    recipe and dtype: `replicas` in gradients alone, whose sum over ranks has another order; under TP activations
    too, which changes the rounding of some float8 value in the first step; so do gradients of keys that more than two
    ranks share, elsewhere than on the virtual device. `clipped`: the norm that multiplies every gradient has another
    order.
    """
    if case.train.dtype == "float64":
        return EVERY_LAYOUT
    if sums_in_order(case, numerics) and case.compile != "inductor":  # generated code rounds elsewhere
        return SAME_ORDER
    form = "-clipped" if clips_by_a_rounded_norm(case) else "-replicas"
    form = "" if activations_differ(case, numerics) or case.compile == "inductor" else form
    reduced = "" if case.train.reduce_dtype == "float32" else f"-reduce_{case.train.reduce_dtype}"
    return f"{_training(case)}-{_recipe(case)}{form}-{case.train.dtype}{reduced}"


def _training(case: Case) -> str:
    """Return the model, and the learning rate where it is not the default. A preset with overrides is another model."""
    target = "" if case.target == REFERENCE else f"{case.target.replace('.', '_')}_"
    values = own_values(case)
    noisy = ((axis, name) for name, axis in DECLARED.items() if axis.noise and values[name] != DEFAULTS[name])
    changed = (axis.noise.format(values[name]) for axis, name in noisy)
    return f"{target}{case.model.preset}{''.join(changed)}"


def tolerance_for(case: Case, root: Path) -> Tolerance:
    """How far the losses of a case may be from its golden, in nats; its own `loss_tolerance` overrides the table.

    A loss is a mean over the tokens of a batch, and the errors of tokens are as good as independent: with fewer tokens
    than were measured the tolerance grows by the root of their ratio. With more it stays what was measured.

    Raises `ToleranceMissing` when nothing was measured for its key or for this many steps: noise grows with every step,
    so nothing is extrapolated, but derived (`checks/measuring.py`). Raises `ToleranceUnfounded` when the
    evidence does not support the number.
    """
    key, steps = tolerance_key(case), case.train.steps
    own = case.checks.loss_tolerance
    if own is not None:
        return Tolerance(name=LOSS_VS_GOLDEN, key=key, per_step=(own,) * steps, evidence="loss_tolerance of case")
    measured, samples = _tolerance(LOSS_VS_GOLDEN, key, steps, root)
    measured_tokens = min(parse_case_id(sample.case_id).train.valid_tokens for sample in samples)
    factor = max(1.0, math.sqrt(measured_tokens / case.train.valid_tokens))
    if factor == 1:
        return measured
    per_step = tuple(allowed * factor for allowed in measured.per_step)
    evidence = f"{measured.evidence}; times {factor:.3g} for {case.train.valid_tokens} tokens"
    return msgspec.structs.replace(measured, per_step=per_step, evidence=evidence)


def parity_tolerance_for(case: Case, root: Path, numerics: Numerics = VIRTUAL_DEVICE) -> Tolerance:
    """How far any gradient may be from the single-rank reference, relative to its norm. Raises like `tolerance_for`."""
    return _tolerance(PARITY, parity_key(case, numerics), case.train.steps, root)[0]


def _tolerance(check: str, key: str, steps: int, root: Path) -> tuple[Tolerance, list[Sample]]:
    entry = read_table(root).get(check, {}).get(key)
    if entry is None:  # what the package measured holds in every project that did not measure it
        root = own_root()
        entry = read_table(root).get(check, {}).get(key)
    fix = f"{MEASURE} with such cases{', or set `loss_tolerance` in the case' if check == LOSS_VS_GOLDEN else ''}."
    if entry is None:
        raise ToleranceMissing(f"there is no {check} tolerance for {key}.", where=TABLE_FILE, fix=fix)
    measured = read_evidence(root, check)
    if not holds_for(installed_versions(PACKAGES), measured.software):
        what = f"the {check} tolerances were measured with an unreleased build, and hold for no other one."
        raise ToleranceMissing(what, where=TABLE_FILE, fix=fix)
    samples = [sample for sample in measured.samples if sample.key == key]
    reasons = problems(check, key, entry, samples)
    if reasons:
        raise ToleranceUnfounded("; ".join(reasons) + ".", where=TABLE_FILE, fix=f"{MEASURE} and adapt the number.")
    per_step = _per_step(entry, measured_steps(samples))
    if key in OF_EVERY_MODEL:
        per_step += per_step[-1:] * (steps - len(per_step))
    if len(per_step) < steps:
        what = f"the tolerance of {key} covers {len(per_step)} steps, the case trains {steps}."
        raise ToleranceMissing(what, where=TABLE_FILE, fix=fix)
    evidence = f"{len(samples)} samples, {len({sample.seed for sample in samples})} seeds"
    return Tolerance(name=check, key=key, per_step=per_step[:steps], evidence=evidence), samples


def measured_steps(samples: Sequence[Sample]) -> int:
    """Return the last step that at least `MIN_SEEDS` seeds and `MIN_LAYOUTS` layouts reached; 0 without one."""
    for steps in range(max((len(sample.per_step) for sample in samples), default=0), 0, -1):
        reached = [sample for sample in samples if len(sample.per_step) >= steps]
        seeds, layouts = {sample.seed for sample in reached}, {sample.layout for sample in reached}
        if len(seeds) >= MIN_SEEDS and len(layouts) >= MIN_LAYOUTS:
            return steps
    return 0


def noise(check: str, samples: Sequence[Sample]) -> tuple[float, ...]:
    """Return the largest distance measured up to each step. It never decreases: errors accumulate in training."""
    measured = [sample.per_step for sample in samples]
    if check == PARITY:
        measured += _as_if_flipped_at_once(measured)
    steps = range(measured_steps(samples))
    peaks = (max(distances[step] for distances in measured if len(distances) > step) for step in steps)
    return tuple(itertools.accumulate(peaks, max))


def _as_if_flipped_at_once(measured: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the same runs as if a float8 value had been rounded otherwise than on one rank in step 2 already.

    Runs that are bitwise equal up to the gradients of step 1 have other weights, in their last bits, from step 2 on: in
    every step these may decide a rounding. In which one they first did is chance, and how far a gradient is off as many
    steps later is not: 0.01 in the same step, 0.1 two later.
    """
    begun = MAX_SPREAD * max((distances[0] for distances in measured), default=EXACT)
    first = (next((at for at, one in enumerate(distances) if at and one > begun), 0) for distances in measured)
    return [(distances[0], *distances[at:]) for distances, at in zip(measured, first, strict=True) if at]


def fit(check: str, samples: Sequence[Sample], margin: float) -> tuple[float, ...]:
    """Return the numbers that these samples support: noise times margin, rounded down to three digits, one a step."""
    return tuple(_round_down(value * margin) for value in noise(check, samples))


def evidence_path(root: Path, check: str, hardware: str = "") -> Path:
    folder = root / "golden"
    return folder / hardware / f"evidence-noise-{check}.json" if hardware else folder / "evidence" / f"{check}.json"


def read_evidence(root: Path, check: str = LOSS_VS_GOLDEN) -> Evidence:
    """Return the measured samples. Raises `ToleranceUnfounded` when there are none, `Damaged` when the file is."""
    path, missing = evidence_path(root, check), "no distances were measured."
    try:
        return read_sealed(path, Evidence, remake=f"{MEASURE}.", missing=missing)
    except Missing as error:
        raise ToleranceUnfounded(error.what, where=error.where, fix=error.fix) from error


def write_evidence(root: Path, evidence: Evidence, check: str = LOSS_VS_GOLDEN, hardware: str = "") -> Path:
    """Store the samples, sorted, and return the path. Raises for distances that are negative or not finite."""
    for sample in evidence.samples:
        if not sample.per_step or not all(math.isfinite(value) and value >= 0 for value in sample.per_step):
            raise ToleranceUnfounded(f"measured {sample.per_step}, which is not a distance.", where=sample.case_id)
    ordered = sorted(evidence.samples, key=lambda item: (item.key, item.seed, item.case_id, item.environment))
    return write_sealed(evidence_path(root, check, hardware), msgspec.structs.replace(evidence, samples=tuple(ordered)))


def read_table(root: Path) -> dict[str, dict[str, Entry]]:
    path = root / TABLE_FILE
    try:
        table = msgspec.toml.decode(path.read_bytes(), type=dict[str, dict[str, Entry]])
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ToleranceUnfounded(f"is not readable ({error}).", where=str(path), fix="fix the file.") from error
    except FileNotFoundError:
        return {}  # an empty table: every key is missing
    except OSError as error:
        raise ToleranceUnfounded(f"cannot be read: {error.strerror}.", where=str(path), fix="restore it.") from error
    unknown = sorted(set(table) - set(CHECKS))
    if unknown:
        use = " or ".join(f"[{check}.KEY]" for check in CHECKS)
        raise ToleranceUnfounded(f"unknown check {unknown[0]!r}.", where=str(path), fix=f"use {use}.")
    return table


def problems(check: str, key: str, entry: Entry, samples: Sequence[Sample]) -> list[str]:
    """Return why the evidence does not support an entry; empty when it does."""
    spread = _spread_problem(key, samples) if check == PARITY and samples else []
    return [*spread, *_number_problems(check, key, entry, samples)]


def _number_problems(check: str, key: str, entry: Entry, samples: Sequence[Sample]) -> list[str]:
    if not MIN_MARGIN <= entry.margin <= MAX_MARGIN:  # also refuses NaN
        return [f"{key}: margin {entry.margin} is not between {MIN_MARGIN} and {MAX_MARGIN}"]
    floor = noise(check, samples)
    if not floor:
        return [f"{key}: no step was measured with {MIN_SEEDS} seeds and {MIN_LAYOUTS} layouts"]
    if entry.allowed == ():
        return [f"{key}: allows nothing: the list is empty"]
    if isinstance(entry.allowed, tuple) and len(entry.allowed) > len(floor):
        return [f"{key}: names {len(entry.allowed)} steps, the evidence covers {len(floor)}"]
    if isinstance(entry.allowed, float):
        floor = (floor[-1],)
    return [problem for step, low in enumerate(floor, 1) for problem in _step_problems(key, entry, step, low)]


def _spread_problem(key: str, samples: Sequence[Sample]) -> list[str]:
    """Kinds of runs that share a key although one is far noisier: the key would hide faults of the quieter one.

    They are compared in the first step: later ones amplify a single rounding, or do not, by chance. Of parity alone:
    a loss has the noise of its golden, which may come from another machine.
    """
    first: dict[str, float] = {}
    for sample in samples:
        first[sample.layout] = max(sample.per_step[0], first.get(sample.layout, EXACT))
    low, high = (most(first, key=lambda layout: first[layout]) for most in (min, max))
    if first[high] <= MAX_SPREAD * first[low]:
        return []
    far, near = f"{high} is up to {first[high]:.2g} off in step 1", f"{low} at most {first[low]:.2g}"
    return [f"{key}: {far}, {near}: they need separate keys"]


def _step_problems(key: str, entry: Entry, step: int, low: float) -> list[str]:
    """Return why the number of one step is below its noise `low` or too far above it."""
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
    """Return the largest number with three significant digits that is not above `value`."""
    return float(Context(prec=3, rounding=ROUND_DOWN).create_decimal(repr(value)))
