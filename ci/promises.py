"""What clean runs use of every limit: `python ci/promises.py` runs them, and adds what it saw to the record.

    python ci/promises.py                      one small case of every kind
    python ci/promises.py ID ID ...            these cases
    ATEN_CPU_CAPABILITY=avx2 python ci/promises.py      another kernel of the CPU, under its own name

Prints every limit of `harness/promises.toml` with its floor, and which are wider than four times that. A case that does
not pass is no clean run, and is not recorded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.engine.hardware import arithmetic_limits
from harness.matrix.caseid import parse_case_id
from harness.project import find_project
from harness.promises import PROMISES, Promise, used
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.sources import installed_versions
from harness.verdict import Verdict
from harness.workflow import prepared, run_cases

RECORD = Path(__file__).parents[1] / "golden" / "evidence" / "promises.json"
WIDE = 4.0  # times the floor
CASES = (
    "fsdp2-tensorwise-v2048-gb4-s3-b16",
    "fsdp2-rowwise-v2048-gb4-s3-clip0.25-f32",
    "hsdp2x2-tensorwise-v2048-gb4-s3-param.b16-b16",
    "tp2-tensorwise-v2048-gb4-s3-b16",
    "tp2-rowwise-bias-v2048-gb4-s3-f32",
    "tp2-tensorwise-v2048-gb4-s2-f64",
    "tp4-rowwise-v2048-gb4-s3-sgd-lr0.1-b16",
    "fsdp2-ep2-rowwise-moe4-sigmoid-balance-v2048-gb4-s2-b16",
    "single-tensorwise-inductor-v2048-gb2-s1-b16",
    "single-rowwise-inductor-v2048-gb2-s1-f32",
)


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """What clean runs of one environment used at most, by the name of the limit, as a share of it."""

    cases: tuple[str, ...]
    software: Mapping[str, str]
    used: Mapping[str, float]


def read(path: Path = RECORD) -> dict[str, Runs]:
    """Return the runs by what was set for them: "default", "ATEN_CPU_CAPABILITY=avx2"."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Runs]) if path.exists() else {}


def floor(name: str, promise: Promise, record: Mapping[str, Runs]) -> float | None:
    """Return the largest that clean runs had of a limit; None if nothing was measured."""
    seen = [runs.used[name] * promise.number for runs in record.values() if name in runs.used]
    return max([*seen, *([] if promise.floor is None else [promise.floor])], default=None)


def is_wide(name: str, promise: Promise, record: Mapping[str, Runs]) -> bool:
    """Return True for a limit of rounding or of a spread that is wider than `WIDE` times what was measured."""
    low = floor(name, promise, record)
    return promise.kind != "choice" and (low is None or promise.number > WIDE * low)


def _with(before: Runs | None, case: str, shares: Mapping[str, float]) -> Runs:
    cases, seen = ((), {}) if before is None else (before.cases, before.used)
    return Runs(
        cases=tuple(sorted({*cases, case})),
        software=installed_versions(("torch", "torchao")),
        used={name: max(seen.get(name, 0.0), shares.get(name, 0.0)) for name in sorted({*seen, *shares})},
    )


def main() -> None:
    """Run the cases, record what they used, and print all limits."""
    names, record = sys.argv[1:] or CASES, read()
    project, here = find_project(RECORD.parents[2]), arithmetic_limits() or "default"
    for name in names:
        case = parse_case_id(name)
        judge, plan = prepared(project, [case], make_plan(jobs=1), print)
        (result,) = run_cases(project, [case], plan, judge, SilentProgress()).results
        print(name, result.verdict.value, *(finding.message for finding in result.findings), flush=True)
        shares = used()
        if result.verdict is Verdict.PASSED:
            record[here] = _with(record.get(here), name, shares)
        RECORD.write_text(json.dumps(msgspec.to_builtins(record), indent=2, sort_keys=True) + "\n")
    for name, promise in PROMISES.items():
        low = floor(name, promise, record)
        ratio = f"{promise.number / low:8.3g}" if low else "        "
        shown = "wide: " + (promise.wide or "no reason") if is_wide(name, promise, record) else ""
        print(f"{name:32} {promise.number:10.3g} {'' if low is None else f'{low:.2g}':>8} {ratio}  {shown}")


if __name__ == "__main__":
    main()
