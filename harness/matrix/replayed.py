"""Replayed steps: where local parity judges every module by itself, and in how many steps.

The modules of these steps are recorded in a run and repeated on one rank (`worker/replay.py`).
"""

from __future__ import annotations

from harness.matrix.case import Case
from harness.matrix.linears import linear_features, linear_fqns, linear_name, parameter_count
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, sums_in_order
from harness.matrix.recipes import ITEM_BYTES
from harness.matrix.targets import computes_on_plain_shards, is_llama

# A run hands what it recorded to its replay in one message, which may have 1 GiB.
RECORDED_BYTES = 640 << 20
RECORDED_STEPS = 5  # what goes wrong in a module does so from one of the first steps on, or in every check


def drifts(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """True where ranks sum in another order than one rank does, in a dtype that rounds: trajectories drift apart."""
    return not sums_in_order(case, numerics) and case.train.dtype != "float64"


def replayed_steps(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> int:
    """The number of steps, from the first, whose modules are recorded and replayed; 0 for none.

    In eager runs that drift: of large models so many as fit into a message. How large a model is that is not known
    shows in the run (`worker/probes/module_tensors.py`).
    """
    if not drifts(case, numerics) or case.compile != "none":
        return 0
    if case.layout.tp > 1 and computes_on_plain_shards(case.target):
        return 0
    if not is_llama(case.target):
        return 0 if case.float8.tp_styles == "float8" else min(case.train.steps, RECORDED_STEPS)
    return min(case.train.steps, RECORDED_STEPS, RECORDED_BYTES // _recorded_bytes(case))


def _recorded_bytes(case: Case) -> int:
    """Bytes of one step over all ranks: operands, results and their gradients; parameters and theirs in float32."""
    features = [linear_features(case, linear_name(fqn)) for fqn in linear_fqns(case)]
    activations = case.train.tokens * sum(inputs + outputs for inputs, outputs in features)
    return 2 * (4 * parameter_count(case) + ITEM_BYTES[case.train.dtype] * activations)
