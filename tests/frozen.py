"""What a redesign of cases must not change: ids, golden and witness names, relations and keys of many cases.

`python -m tests.frozen > tests/frozen.txt` stores what holds now. `tests/unit/test_frozen.py` compares.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.errors import HarnessError
from harness.evidence.costs import case_features
from harness.evidence.tolerance import parity_key, tolerance_key
from harness.expect.relations import partner, relations
from harness.matrix.axes import AXES, axis_type, case_from_axes, choices, own_axes
from harness.matrix.case import Case
from harness.matrix.casefile import read_case_file
from harness.matrix.caseid import case_id, family_id, reference_case, resumed_in, solo_case, twin_case
from harness.matrix.choice import read_chosen
from harness.matrix.rules import exclusions, expected_refusal

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_suffix(".txt")
TIERS = ("smoke", "pr", "nightly", "noise", "gloo", "torchtitan")
DRAWN = 600
_NUMBERS: dict[str, tuple[object, ...]] = {
    "target": ("reference", "my_pkg.my_target"),
    "filter_fqns": ((), ("wk", "wq"), ("layers.0",)),
    "casts": ((), ("go:e4m3",), ("go_gw:dis", "i_gw:dis")),
    "max_norm": (None, 0.5, 1e-05),
    "loss_tolerance": (None, 0.05),
    "lr": (1e-3, 3e-4, 1e-05),
    "seed": (0, 1, 7),
    "dim": (None, 64, 256),
    "ffn_dim": (None, 512),
    "heads": (None, 4),
    "kv_heads": (None, 4),
}
_COUNTS = (1, 2, 3, 4, 8, 16, 32, 2256)


def frozen_line(case: Case) -> str:
    """The id of a case, and a digest of everything that is derived from it."""
    text = "\n".join(map(str, _derived(case)))
    return f"{case_id(case)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _cases() -> Iterator[Case]:
    seen: set[str] = set()
    for case in (*_stored(), *_drawn()):
        if case_id(case) not in seen:
            seen.add(case_id(case))
            yield case


def _stored() -> Iterator[Case]:
    from harness.plugins.bugs.bugfile import read_bugs
    from harness.plugins.faults.faults import all_faults

    for tier in TIERS:
        yield from read_case_file(ROOT / "cases" / f"{tier}.toml").cases
    yield from (chosen.case for chosen in read_chosen(ROOT / "cases" / "chosen" / "pr.toml"))
    yield from (bug.case for bug in read_bugs(ROOT / "cases" / "bugs") if bug.case is not None)
    for fault in all_faults().values():
        yield from fault.hosts(at_most=2)


def _drawn() -> Iterator[Case]:
    """Cases with random values on random axes, half of them with few."""
    source = random.Random(0)
    for number in range(DRAWN):
        names = source.sample(sorted(AXES), source.randint(1, 5) if number % 2 else source.randint(5, len(AXES)))
        try:
            yield case_from_axes({name: source.choice(_values(name)) for name in names})
        except HarnessError:
            continue


def _values(name: str) -> tuple[object, ...]:
    return choices(name) or _NUMBERS.get(name) or (_COUNTS if axis_type(name) is int else ())


def _derived(case: Case) -> Iterable[object]:
    yield family_id(case)
    yield from (case_id(other(case)) for other in (solo_case, twin_case, reference_case))
    yield sorted(own_axes(case).items())
    yield from (case_id(resumed) for resumed in resumed_in(case))
    refusal = expected_refusal(case)
    yield refusal.name if refusal is not None else None
    excluded = [rule.name for rule in exclusions(case)]
    yield excluded
    yield tolerance_key(case), parity_key(case)
    if not excluded:
        yield sorted(case_features(case).items())
        related = (partner(case), *relations(case))
        yield [(relation.name, case_id(relation.partner)) for relation in related if relation is not None]


if __name__ == "__main__":
    sys.stdout.writelines(f"{frozen_line(case)}\n" for case in _cases())
