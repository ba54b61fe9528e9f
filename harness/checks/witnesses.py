"""The evidence that a check may use besides the case and its run: expectations, goldens, signatures, reference runs.

`running/` collects it before the ranks start.
"""

from __future__ import annotations

import msgspec

from harness.evidence.golden import Golden
from harness.evidence.signature import Signature
from harness.evidence.tolerance import Tolerance
from harness.expect.expectations import Expectations
from harness.trace import Run


class Witnesses(msgspec.Struct, frozen=True, kw_only=True):
    """What one case is judged by. None: not available, which is a finding of the check that needs it."""

    expect: Expectations
    records: tuple[str, ...] = ()  # the fields of `RankTrace` that the ranks were asked to fill
    golden: Golden | None = None
    signature: Signature | None = None
    update_signature: str = ""  # the command that records one
    tolerance: Tolerance | None = None
    parity_tolerance: Tolerance | None = None
    solo: Run | None = None  # the run of the solo witness, the single-rank reference with the same recipe
    replay: Run | None = None  # this very run again, module by module on one rank
    partner: Run | None = None  # the run of `expect.relation.partner`
    partner_has_fix: bool = False  # partner and signature are of a run with the candidate fix, as the second run is
