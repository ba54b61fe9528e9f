"""The hand-off of a case: its ranks train it in its layout and export it before and after the last step.

Each export is judged by the weights that the ranks had, and must have the bits of an export of one rank. The weights
are compared with those of the single-rank reference: exactly where the numerics of the case promise it, in float64 by
half a quantum, and by names and order where the sums of ranks drift.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness.checks.catalogue import by_cause
from harness.errors import HarnessError
from harness.hints import run_cases
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, values_of
from harness.matrix.numerics import drifts, sums_in_order
from harness.plugins.handoff import rules
from harness.plugins.handoff.formats import FORMATS
from harness.plugins.handoff.judge import Judged
from harness.plugins.handoff.library import judge
from harness.project import Project
from harness.request import CallRequest
from harness.running.executor import Executor, open_executor
from harness.running.identity import check_targets, search_path
from harness.running.plan import Plan, make_plan
from harness.running.selection import one_case
from harness.verdict import Finding

_OTHERS = re.compile(r"/(harness|site-packages|lib/python[\d.]+)/")
_PROGRAM = "harness.plugins.handoff.worker.cases"


def is_case(source: Path) -> bool:
    """Return True for the file of a case, and for what is no path and has mostly words of case ids."""
    if source.exists() or len(source.parts) > 1:
        return source.suffix == ".toml"
    words = source.name.split("-")
    return sum(values_of(word) is not None for word in words) > len(words) / 2


def hand_off_case(
    project: Project, source: str, exporter: str, formats: Sequence[str], how: Mapping[str, Any]
) -> list[Judged]:
    """Return what was found of each format. HarnessError for a case or an exporter that does not run.

    `exporter`: "module:function", or empty. `how`: what `judge` is given besides.
    """
    case, plan = one_case(project, source), make_plan().on_cpu
    check_targets([case.target], project.root)
    what, fix = "", "give a case of fewer ranks."
    if exporter and not re.fullmatch(r"[\w.]+:\w+", exporter):
        what, fix = f"{exporter} is no function of a module.", "give EXPORTED as MODULE:FUNCTION: my_export:to_hf."
    elif case.compile != "none":
        what, fix = "it is compiled, which changes no weight.", "give the case without it."
    elif case.world_size > plan.most_ranks(case):
        what = f"it needs {case.world_size} ranks, and this machine has room for {plan.most_ranks(case)}."
    if what:
        raise HarnessError(what, where=source, fix=fix)
    with open_executor(plan, project) as executor:
        given = case_id(case), list(formats), exporter, list(search_path(project.root))
        ranks = _called(executor, plan, case, case.world_size, (*given, []))
        (one_rank,) = _called(executor, plan, case, 1, (*given, [made["source"] for made in ranks]))
    return [judged_case(case, name, ranks, one_rank, how) for name in formats]


def _called(executor: Executor, plan: Plan, case: Case, ranks: int, arguments: tuple[Any, ...]) -> list[Any]:
    """Return what each rank returned, by rank. HarnessError with the first that failed."""
    from harness.plugins.handoff.worker.states import received, sent  # which imports torch

    request = CallRequest(module=_PROGRAM, arguments=sent(arguments))
    name = f"handoff-{ranks}-{case_id(case)}"
    outcome = executor.call(request, ranks, job_id=name, deadline_s=plan.deadline_s(case))
    if outcome is not None and outcome.status == "ok":
        return [received(end.payload or b"") for end in sorted(outcome.ranks, key=lambda end: end.rank)]
    ended = () if outcome is None else outcome.ranks
    first = next((end for end in ended if end.payload is None and not end.consequence), None)
    what = "ranks were stopped" if outcome is None else outcome.message
    lines = first.traceback.splitlines() if first else []
    own = [line for line in lines if line.startswith('  File "/') and not _OTHERS.search(line)]
    fix = f"correct {own[-1].strip().removeprefix('File ')}." if own else f"run it: `{run_cases(case_id(case))}`."
    fix = f"correct {arguments[2]}." if arguments[2] and not own else fix
    raise HarnessError(f"{what.rstrip('.')}.", where=case_id(case), fix=fix)


def judged_case(case: Case, name: str, ranks: list[Any], one_rank: Any, how: Mapping[str, Any]) -> Judged:
    """Judge what all ranks, and one that exported alone, returned of a format."""
    made = {key: [rank["made"][name][key] for rank in ranks] for key in ranks[0]["made"][name]}
    source, updated = ([rank[key] for rank in ranks] for key in ("source", "updated"))
    second = {"after": (updated, made["after"]), "kept": made["kept"], "again": made.get("again")}
    form = FORMATS[name]
    # Not where the data of an amax are rounded down to a power of two, nor where its reciprocal is rounded once more.
    returns = form.clips or not (form.power_of_two or form.divides)
    also = replace(how["also"], **second, idempotent=returns, one_rank=one_rank["one_rank"][name])
    judged = judge(source, made["exported"], format=name, **{**how, "also": also})
    if judged.findings:
        return judged
    found = _beside_one_rank(case, name, (one_rank["trained"], updated, made["after"]), how)
    return replace(judged, findings=by_cause([*found]))


def _beside_one_rank(case: Case, name: str, states: tuple[Any, Any, Any], how: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with weights, or with their export, beside those that one rank trained."""
    trained, updated, exported = states
    if case.train.dtype == "float64" and not sums_in_order(case):
        yield from judge(trained, exported, format=name, **{**how, "also": None}).findings
        return
    for finding in judge(trained, updated, format="high_precision").findings:
        if not drifts(case) or finding.rule != rules.ROUNDED.name or finding.values.get("like"):
            yield finding
