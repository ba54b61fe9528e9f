"""What a check may look at besides the case and its run: the things a run is compared with.

Owns one value only. It does not know where a witness comes from; the workflow collects them before the ranks start.
"""

from __future__ import annotations

import msgspec

from harness.measured.golden import Golden
from harness.measured.tolerance import Tolerance
from harness.spec.relations import Relation
from harness.spec.rules import Refusal
from harness.trace import Run


class Witnesses(msgspec.Struct, frozen=True, kw_only=True):
    """Everything to judge one case by. A golden or tolerance that is None could not be had, which is a finding.

    `refusal`: the error this case must end with, or None when it must train. `expected_fqns` (sorted) and
    `expected_scaled_mm` (calls per rank and step) say what FP8 conversion must do.
    """

    golden: Golden | None
    tolerance: Tolerance | None
    solo: Run | None = None  # the solo witness; None when it could not be had
    parity_tolerance: Tolerance | None = None
    relation: Relation | None = None  # what `partner` promises; None where the case is not compared with one
    partner: Run | None = None  # the run of `relation.partner`; None when it could not be had
    refusal: Refusal | None
    expected_fqns: tuple[str, ...]
    expected_scaled_mm: int
