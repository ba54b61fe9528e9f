"""The request: what a rank is asked to do. Encoded into a job's payload by the controller, decoded inside the rank."""

from __future__ import annotations

import msgspec

from harness.spec.case import Case


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train one case. `injections` are `FILE.py:FUNCTION` to call before the target is built, in order.

    `solo`: one rank computes what all ranks of the case's layout must compute together (`worker/solo.py`).
    """

    case: Case
    device: str = "cpu"  # "cpu" or "cuda"
    injections: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()  # fields of RankTrace to be recorded: "sketches", "operands", "traffic", ...
    solo: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks that serve this request."""
        return 1 if self.solo else self.case.world_size
