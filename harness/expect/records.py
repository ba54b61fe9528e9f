"""Records: which probes have nothing to record in a run of a case, which checks nothing to say, and why.

Every other record that a run asks for must be there: a check must not vanish because a probe recorded nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.matrix.case import Case
from harness.matrix.replayed import drifts, replayed_steps


def not_recorded(case: Case) -> Mapping[str, str]:
    """The fields of `RankTrace` that stay empty in every run of this case, each with the reason."""
    empty: dict[str, str] = {}
    if case.compile == "none":
        empty["graphs"] = "nothing is compiled"
    else:
        empty["operands"] = "compiled blocks do not call what the probe patches; graph_scales judges their casts"
    if not replayed_steps(case):
        empty["module_tensors"] = _not_replayed(case)
    return empty


def not_judged(case: Case) -> Mapping[str, str]:
    """The checks that can say nothing of this case although its records are there, each with the reason."""
    if case.compile == "inductor":
        return {"graph_scales": "generated code casts inside of its kernels, where no probe sees it"}
    return {}


def partly_judged(case: Case) -> Mapping[str, str]:
    """The checks that judge a part of this case, each with the part that it does not judge."""
    steps, recorded = case.train.steps, replayed_steps(case)
    if 0 < recorded < steps:
        return {"local_parity": f"steps {recorded + 1} to {steps}: modules are recorded in the first steps only"}
    return {}


def _not_replayed(case: Case) -> str:
    if case.compile != "none" and case.train.dtype != "float64":
        return "hooks would change what is compiled, and the case has no eager partner that must equal it"
    if drifts(case):
        return "the modules of one step are more than a replay can be given"
    return "parity is exact in this layout and dtype"
