"""The input of a rank. The controller encodes it as the payload of a job, and the rank decodes it."""

from __future__ import annotations

import msgspec

from harness.matrix.case import Case
from harness.trace.modules import ModuleShard


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train one case. `injections` are applied in order before the target is built: `FILE.py:FUNCTION` or `fault:NAME`.

    `solo`: a single rank computes what all ranks of the layout must compute together.
    """

    case: Case
    device: str = "cpu"  # "cpu" or "cuda"
    injections: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()  # fields of RankTrace to record: "sketches", "operands", "traffic", ...
    solo: bool = False
    # By rank, what the modules of a parallel run had (`RankTrace.module_tensors`): a single rank repeats them.
    replayed: tuple[tuple[ModuleShard, ...], ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks that run this request."""
        return 1 if self.solo or self.replayed else self.case.world_size
