"""Records: which probes have nothing to record in a run of a case, and why.

Every other record that a run asks for must be there: a check must not vanish because a probe recorded nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.matrix.case import Case
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, drifts, replayed_steps
from harness.matrix.targets import computes_on_plain_shards, is_llama


def not_recorded(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> Mapping[str, str]:
    """The fields of `RankTrace` that stay empty in every run of this case, each with the reason."""
    empty: dict[str, str] = {}
    if case.compile == "none":
        empty["graphs"] = "nothing is compiled"
    else:
        empty["operands"] = "compiled blocks do not call what the probe patches; graph_scales judges their casts"
    if not replayed_steps(case, numerics) or not is_llama(case.target):
        empty["module_tensors"] = _not_replayed(case, numerics)
    return empty


def _not_replayed(case: Case, numerics: Numerics) -> str:
    if case.compile != "none" and case.train.dtype != "float64":
        return "hooks would change what is compiled, and the case has no eager partner that must equal it"
    if drifts(case, numerics) and case.layout.tp > 1 and computes_on_plain_shards(case.target):
        return (
            f"{case.target} computes with plain tensors, which do not tell which part of a module's tensor a rank has"
        )
    if drifts(case, numerics) and case.float8.tp_styles == "float8" and not is_llama(case.target):
        return "which module casts an input is the choice of the float8 TP styles"
    if drifts(case, numerics):
        return "the modules of one step are more than a replay can be given"
    return "parity is exact in this layout and dtype"
