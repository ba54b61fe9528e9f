"""Fitting the cost model of `evidence/costs.py` to the measured CPU seconds of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.engine.hardware import cpu_name
from harness.errors import HarnessError
from harness.evidence.costs import SCHEMA, Costs, case_features, solo_features
from harness.hints import fit_costs as fit_costs_command
from harness.matrix.caseid import parse_case_id
from harness.matrix.rules import expected_refusal
from harness.running.stored import read_results
from harness.timestamp import timestamp
from harness.verdict import Verdict

_FEWEST = 30  # runs below which nothing is fitted: there are more than a dozen features
_SOLO = "solo "


def fit_costs(file: Path, *, command: str) -> Costs:
    """The costs that the results in a file show. HarnessError when it holds too few runs."""
    run = read_results(file)
    # a case that is known has run twice where its fault has a fix
    trained = [
        (parse_case_id(result.case_id), result.cpu_s) for result in run.results if result.verdict is Verdict.PASSED
    ]
    measured = [(case_features(case), cpu_s) for case, cpu_s in trained if expected_refusal(case) is None]
    solos = [
        (solo_features(parse_case_id(name)), witness.cpu_s)
        for witness in run.end.witnesses
        if witness.name.startswith(_SOLO) and " " not in (name := witness.name.removeprefix(_SOLO))
    ]
    if len(measured) < _FEWEST or len(solos) < _FEWEST:
        what = f"holds {len(measured)} runs and {len(solos)} solo witnesses; {_FEWEST} of each are needed."
        raise HarnessError(what, where=str(file), fix=f"run tier pr with an empty cache: `{fit_costs_command()}`.")
    weights, error = _fitted(measured)
    return Costs(
        schema=SCHEMA,
        case=weights,
        solo=_fitted(solos)[0],
        cases_fitted=len(measured),
        witnesses_fitted=len(solos),
        typical_error=round(error, 3),
        software={name: version for name, version in run.end.provenance.items() if name in ("torch", "torchao")},
        cpu=cpu_name(),
        command=command,
        created=timestamp(),
    )


def _fitted(samples: Sequence[tuple[Mapping[str, float], float]]) -> tuple[dict[str, float], float]:
    """Weights by feature, none negative, and the median relative error. Small costs count as much as large ones."""
    import numpy as np

    names = list(samples[0][0])
    table: Any = np.array([[features[name] for name in names] for features, _ in samples])
    measured: Any = np.array([cpu_s for _, cpu_s in samples])
    importance = 1 / np.sqrt(np.maximum(measured, 0.1))
    kept = list(range(len(names)))
    while True:
        weights, *_ = np.linalg.lstsq(table[:, kept] * importance[:, None], measured * importance, rcond=None)
        if (weights >= 0).all():
            break
        kept = [index for index, weight in zip(kept, weights, strict=True) if weight > 0]
    errors = np.abs(table[:, kept] @ weights / measured - 1)
    return {names[index]: round(float(weight), 4) for index, weight in zip(kept, weights, strict=True)}, float(
        np.median(errors)
    )
