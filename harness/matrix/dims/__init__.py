"""The dimensions: every way to share the work of a run among ranks."""

from harness.matrix.dims.cp import CP
from harness.matrix.dims.ddp import DDP
from harness.matrix.dims.ep import EP
from harness.matrix.dims.fsdp import FSDP
from harness.matrix.dims.pp import PP
from harness.matrix.dims.tp import TP

DIMENSIONS = (FSDP, DDP, TP, CP, PP, EP)
