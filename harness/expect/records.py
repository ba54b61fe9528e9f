"""Records: which probes have nothing to record in a run of a case, which checks nothing to say, and why.

Every other record that a run asks for must be there: a check must not vanish because a probe recorded nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.matrix.case import Case
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, async_tp_gap
from harness.matrix.replayed import drifts, replayed_steps
from harness.matrix.targets import computes_on_plain_shards, is_llama
from harness.trace.stated import MATMULS, SAVED_BYTES, TRAFFIC


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


def not_judged(
    case: Case,
    *,
    model_found: bool = True,
    stated: Collection[str] = (),
    numerics: Numerics = VIRTUAL_DEVICE,
) -> Mapping[str, str]:
    """The checks that can say nothing of this case although its records are there, each with the reason.

    `stated`: what the target states numbers of, which are judged in their place.
    """
    reasons: dict[str, str] = {}
    if case.compile == "inductor":
        reasons["graph_scales"] = "generated code casts inside of its kernels, where no probe sees it"
    if case.train.max_norm is None:
        reasons["clipping"] = "gradients are not clipped"
    if not case.train.evaluate:
        reasons["evaluation"] = "nothing is evaluated"
    if case.train.resume == "none":
        reasons["resume"] = "the run is not resumed"
    gap = async_tp_gap(case, numerics)
    if gap is not None:
        reasons["metamorphic"] = gap
    if is_llama(case.target):
        own = _not_of_plain_shards(case) if computes_on_plain_shards(case.target) else {}
        return {**reasons, **own, "signature": "formulas say what the model sends, multiplies and keeps"}
    no_formula = f"no formula for the model of {case.target}"
    reasons["memory"] = f"{no_formula}; {_see(SAVED_BYTES, stated)}"
    reasons["live_memory"] = f"{no_formula}; see `signature`"
    if not model_found:
        reasons |= dict.fromkeys(_OF_LINEARS, "the single-rank reference, which tells the linears, did not run")
    elif case.compile != "none":
        reasons["matmuls"] = f"calls of linears are not counted in compiled runs; {_see(MATMULS, stated)}"
    return reasons


def _not_of_plain_shards(case: Case) -> dict[str, str]:
    """What formulas, which describe modules that compute with DTensor, do not say of a target with plain shards."""
    formula = "the formula is that of modules that compute with DTensor"
    reasons = dict.fromkeys(("memory", "live_memory"), f"{formula}: {case.target} saves and keeps other tensors")
    reasons["traffic"] = f"{formula}: {case.target} reduces counts of tokens and metrics as well"
    if case.layout.tp > 1:
        reasons["scales"] = "modules get plain tensors under TP, which do not tell which part of an operand they are"
    if case.layout.tp > 1 and case.compile != "none":
        reasons["recompute"] = "in backward, a graph reads a plain tensor that was gathered through a copy"
    return reasons


def not_judged_on(device: str, case: Case) -> Mapping[str, str]:
    """The checks that can say nothing of a run on this device (`RankTrace.device`), each with the reason."""
    if has_memory_formula(device):
        return {}
    reasons = {"live_memory": _NO_MEMORY_FORMULA, "signature": "signatures are recorded on the virtual device"}
    return reasons if case.compile != "none" else {**reasons, "memory": _NO_MEMORY_FORMULA}


def partly_judged_on(device: str, case: Case) -> Mapping[str, str]:
    """The checks that judge a part of a run on this device, each with the part that they do not judge."""
    if has_memory_formula(device) or case.compile == "none":
        return {}
    return {"memory": f"the number of bytes: {_NO_MEMORY_FORMULA}"}


def has_memory_formula(device: str) -> bool:
    """Whether the formulas of saved and live memory describe what a run on this device keeps."""
    return device == "cpu"


_NO_MEMORY_FORMULA = "the formula is that of a CPU: what attention and random states keep on a GPU differs; see `leaks`"


# Checks of linears, which for a model that is not known are those of its single-rank reference.
_OF_LINEARS = ("fp8_on", "matmuls", "scales", "graph_scales", "recompute", "traffic")


def _see(topic: str, stated: Collection[str]) -> str:
    """The check that judges in place of a formula."""
    return "see `stated`" if topic in stated else "see `signature`"


def partly_judged(case: Case, stated: Collection[str] = (), numerics: Numerics = VIRTUAL_DEVICE) -> Mapping[str, str]:
    """The checks that judge a part of this case, each with the part that it does not judge."""
    steps, recorded = case.train.steps, replayed_steps(case, numerics)
    reasons = {}
    if 0 < recorded < steps:
        reasons["local_parity"] = f"steps {recorded + 1} to {steps}: modules are recorded in the first steps only"
    if not is_llama(case.target):
        no_formula = f"no formula for the model of {case.target}"
        reasons["traffic"] = f"{no_formula}: only what holds for any; {_see(TRAFFIC, stated)}"
        if case.compile == "graph":
            reasons["graph_scales"] = "the number of casts: it is not known which linears are compiled"
        if case.layout.async_tp:
            reasons["graphs"] = f"the number of fused collectives: {no_formula}"
    return reasons


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
