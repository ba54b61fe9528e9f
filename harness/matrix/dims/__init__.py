"""The dimensions: every way to share the work of a run among ranks."""

from typing import Any

from harness.matrix.case import Case
from harness.matrix.dims.cp import CP
from harness.matrix.dims.ddp import DDP
from harness.matrix.dims.dimension import Played
from harness.matrix.dims.ep import EP
from harness.matrix.dims.fsdp import FSDP
from harness.matrix.dims.pp import PP
from harness.matrix.dims.tp import TP

DIMENSIONS = (FSDP, DDP, TP, CP, PP, EP)


def played(case: Case) -> Played:
    """Return the ranks that one rank plays to stand for all of a case."""
    fields: dict[str, Any] = {name: of for one in DIMENSIONS for name, of in one.played(case).items()}
    return Played(**fields)
