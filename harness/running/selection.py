"""The selection: which cases were asked for, by tier, file, id and expression; and what they cost before they run.

Owns how the sources combine. Reading files and expanding the matrix is `matrix/`'s. The cost of a case on this machine
is what was measured here, else what costs and formulas say.
"""

import ast
import contextlib
import datetime
import functools
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from harness.engine.hardware import usable_cpus
from harness.errors import HarnessError
from harness.evidence.costs import FLOPS_PER_CPU_S, Costs, Estimate, estimate, read_costs
from harness.evidence.references import ALL_STORED, Reference, Stored
from harness.evidence.tolerance import Tolerance, ToleranceMissing, parity_tolerance_for, tolerance_for
from harness.hints import explain_case, list_cases
from harness.matrix import choice
from harness.matrix.case import Case
from harness.matrix.casefile import read_case_file
from harness.matrix.caseid import case_id, parse_case_id, values_of
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, parameter_count
from harness.matrix.records import KnownFault, known_with_shipped, quarantine_of, read_quarantine
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.selector import parse_selector
from harness.matrix.tier import Selection, select
from harness.project import Project
from harness.registry import TARGET_NAME, answers, is_llama, needed, targets
from harness.result import CaseResult
from harness.run_options import words_of
from harness.store import RunStore
from harness.text import counted
from harness.verdict import Verdict

DEFAULT_TIER = "smoke"


class NothingSelected(HarnessError):
    """Nothing is left to do: the question was understood, the answer is empty."""


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked for. `sources` are tiers, files or case ids; without any the smoke tier is meant."""

    sources: tuple[str, ...] = ()
    expressions: tuple[str, ...] = ()  # all must hold
    keyword: str | None = None  # of -k
    target: str | None = None  # trains every case instead of its own target
    budget_s: float | None = None  # seconds of wall clock that the run may take; None: as long as it takes
    shard: choice.Shard | None = None  # the part to run here; None: all of it

    @property
    def effective_sources(self) -> tuple[str, ...]:
        return self.sources or (DEFAULT_TIER,)

    @property
    def words_with_absolute_paths(self) -> tuple[str, ...]:
        """`words` with the budget, and with absolute paths of files."""
        files = {text: str(Path(text).resolve()) for text in self.sources if Path(text).is_file()}
        budget = () if self.budget_s is None else ("--budget-s", f"{self.budget_s:g}")
        return (*(files.get(word, word) for word in self.words), *budget)

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words of a command line that ask for the same cases, except the budget and the shard."""
        narrowed = {"expressions": self.expressions, "keyword": self.keyword, "target": self.target}
        return (*self.effective_sources, *words_of(narrowed))


def select_sources(project: Project, query: Query) -> tuple[Selection, ...]:
    return tuple(select_file(project, path) for path in case_files(project, query))


def case_files(project: Project, query: Query) -> list[Path]:
    return [project.case_file(source) for source in query.effective_sources if not is_case_id(project, source)]


def is_case_id(project: Project, source: str) -> bool:
    """Return True for a case id, also a misspelled one: no tier or path, and a word of it is one of case ids."""
    if source in project.tiers or source.endswith(".toml") or os.sep in source:
        return False
    return any(values_of(word) is not None for word in source.split("-"))


def select_file(project: Project, path: Path) -> Selection:
    """Return the selection of one case file of a project: the chosen cases if there is a choice, else a covering array.

    Of a bug file or a folder of them: their cases. A tier of the package is the same in every project: the records of
    the project choose no other cases.
    """
    own = project.shipped_known if project.of_package(path) else project.known
    known = known_with_shipped(own, project.shipped_known)
    for cases_of in answers("bug files"):
        if (file := cases_of(path)) is not None:
            return select(file, known=known)
    if project.bugs in (path, path.parent) or path.is_dir():
        raise needed("bug files", where=str(path))
    chosen = choice.chosen_path(path)
    cases = [chosen_case.case for chosen_case in choice.read_chosen(chosen)] if chosen.exists() else None
    file = read_case_file(path)
    key = msgspec.msgpack.encode((file, known, cases))
    if key not in _SELECTION_CACHE:
        _SELECTION_CACHE[key] = select(file, known=known, chosen=cases)
    return _SELECTION_CACHE[key]


# Selections by their inputs: a command needs its tier up to three times, and nightly takes 0.7 s each time.
_SELECTION_CACHE: dict[bytes, Selection] = {}


def recorded_faults(project: Project) -> tuple[KnownFault, ...]:
    """Return the records of upstream faults: those of the project and those of the package."""
    return known_with_shipped(project.known, project.shipped_known)


def excluded_cells(project: Project, query: Query) -> str:
    """Return how many cells each rule excludes from the matrices of a query; without tiers whose cases were chosen."""
    drawn = [select_file(project, path) for path in case_files(project, query) if not choice.chosen_path(path).exists()]
    counts = sum((Counter(selection.excluded) for selection in drawn), Counter[str]())
    return "; ".join(f"{counted(count, 'cell')} excluded: {name}" for name, count in counts.items())


def whole_tiers(project: Project, case_ids: Collection[str], words: Collection[str]) -> tuple[Selection, ...]:
    """Return the project's tiers, and the package's among the `words` of a run, that the selection has completely."""
    names = [name for name in project.tiers if name in project.own_tiers or name in words]
    selections = (select_file(project, project.case_file(name)) for name in names)
    return tuple(
        selection
        for selection in selections
        if selection.file.blocks and all(case_id(case) in case_ids for case in selection.cases)
    )


def select_cases(project: Project, query: Query) -> tuple[Case, ...]:
    """Return the cases a query asks for, each once, in the order of its sources; HarnessError if there are none."""
    return select_for_target(project, query)[0]


def select_for_target(project: Project, query: Query) -> tuple[tuple[Case, ...], Mapping[str, int]]:
    """Return the cases a query asks for, and by the reason how many of its tiers and ids its target cannot train.

    HarnessError if no case is left before it is divided into shards.
    """
    asked = _asked(project, query)
    chosen = narrowed(asked, query)
    replaced = () if query.target is None else _with_target(query.target, asked)
    excluded = Counter(rules[0].reason for case in replaced if (rules := exclusions(case)))
    if not chosen:
        left = len(trained_by(query.target, asked))
        why = f"; {query.target} trains none of the others: {'; '.join(excluded)}" if excluded else ""
        raise NothingSelected(
            f"no case is selected ({left} before --select and -k{why}).",
            where=shlex.join(query.words),
            fix=f"widen the selection; `{list_cases(query.effective_sources)}` shows it.",
        )
    return in_shard(project, chosen, query.shard), excluded


def narrowed(cases: Sequence[Case], query: Query) -> tuple[Case, ...]:
    """Return the cases, each once, trained by the target of the query, that all of its expressions keep."""
    return tuple(filter(wanted(query), trained_by(query.target, cases)))


def in_shard(project: Project, cases: tuple[Case, ...], shard: choice.Shard | None) -> tuple[Case, ...]:
    """Return the cases of one shard of those given, by the stored costs of the project; all of them without a shard."""
    return cases if shard is None else choice.cases_of_shard(cases, shard, _pricing(read_costs(project.root)))


def _pricing(costs: Costs) -> choice.Pricing:
    return lambda case: choice.Price(own_s=estimate(case, costs).case_cpu_s, shared_s=costs.price(case).shared_s)


def cases_to_explain(project: Project, source: str) -> tuple[Case, ...]:
    """Return the cases of a tier or file, or the case of an id, also where a rule excludes it."""
    if is_case_id(project, source):
        return (parse_case_id(source),)
    return select_cases(project, Query(sources=(source,)))


def one_case(project: Project, text: str) -> Case:
    """Return the case of an id, or the only one of a file. HarnessError for a file with several."""
    cases = select_cases(project, Query(sources=(text,)))
    if len(cases) > 1:
        raise HarnessError(f"it has {len(cases)} cases.", where=text, fix="give the id of one of them.")
    return cases[0]


def _asked(project: Project, query: Query) -> list[Case]:
    cases: list[Case] = []
    for source in query.effective_sources:
        if is_case_id(project, source):
            cases.append(_runnable_case(source))
        else:
            cases += select_file(project, project.case_file(source)).cases
    return cases


def _runnable_case(text: str) -> Case:
    """Return the case of an id; HarnessError naming the rule that excludes it, if one does."""
    case = parse_case_id(text)
    for rule in exclusions(case):
        raise HarnessError(
            f"rule {rule.name} excludes this case: {rule.reason}",
            where=text,
            fix=f"see `{explain_case(text)}`.",
        )
    return case


def wanted(query: Query) -> Callable[[Case], bool]:
    """Return whether `--select` and `-k` of a query keep a case."""
    selectors = [parse_selector(text) for text in query.expressions]
    keyword = parse_keyword(query.keyword) if query.keyword is not None else None
    return lambda case: (
        all(selector.matches(case) for selector in selectors) and (keyword is None or keyword(case_id(case)))
    )


def parse_keyword(text: str) -> Callable[[str], bool]:
    """Return whether an id is one of `-k`: parts of ids with `and`, `or`, `not` and parentheses, as in pytest."""
    parts: list[str] = []

    def named(match: re.Match[str]) -> str:
        if match[0] in ("and", "or", "not"):
            return match[0]
        parts.append(match[0].lower())
        return f"part{len(parts) - 1}"

    def holds(node: ast.AST, name: str) -> bool:
        match node:
            case ast.BoolOp(op=ast.And()):
                return all(holds(operand, name) for operand in node.values)
            case ast.BoolOp():
                return any(holds(operand, name) for operand in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return not holds(node.operand, name)
            case ast.Name():
                return parts[int(node.id.removeprefix("part"))] in name.lower()
        raise SyntaxError

    try:
        expression = ast.parse(re.sub(r"[^\s()]+", named, text), mode="eval").body
        holds(expression, "")
    except SyntaxError:
        fix = "join parts of ids by and, or, not and parentheses: -k 'rowwise and not tp4'."
        raise HarnessError("not an expression.", where=f"-k '{text}'", fix=fix) from None
    return functools.partial(holds, expression)


def trained_by(target: str | None, cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the cases, each once, with this target instead of their own; without those that it excludes."""
    if target is not None:
        cases = [case for case in _with_target(target, cases) if not exclusions(case)]
    return tuple({case_id(case): case for case in cases}.values())


def _with_target(target: str, cases: Sequence[Case]) -> tuple[Case, ...]:
    if not TARGET_NAME.fullmatch(target):
        fix = f"use one of {', '.join(targets())}, or the dotted name of a module."
        raise HarnessError("not the name of a target.", where=f"--target {target}", fix=fix)
    return tuple({replaced: None for case in cases if (replaced := msgspec.structs.replace(case, target=target))})


def quarantined_cases(project: Project, cases: Iterable[Case], note: Callable[[str], None]) -> Mapping[str, str]:
    """By case id: until when, by whom and why. `note` gets expired quarantines.

    Raises HarnessError if the file of the project is invalid.
    """
    entries, today = read_quarantine(project.quarantine), datetime.date.today()
    quarantines = {case_id(case): entry for case in cases if (entry := quarantine_of(entries, case)) is not None}
    for text in dict.fromkeys(entry.expired_text for entry in quarantines.values() if not entry.holds(today)):
        note(f"{text}. Its cases count again.")
    return {name: entry.text(today) for name, entry in quarantines.items() if entry.holds(today)}


_DERIVING = "no tolerance was measured for cases like this: it is derived, from five more BF16 runs on one rank"

START_S = 12.0  # until the fork server is warm
_BUSY = 0.9  # share of the CPUs that a run keeps busy
_FEWEST = 5  # measured cases below which earlier runs say nothing about the speed of this machine


class ExpectedCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds on so many CPUs, CPU seconds, bytes of the largest process and of all at once; `basis`: where from."""

    wall_s: float
    cpus: int
    case_cpu_s: float
    witness_cpu_s: float
    process_bytes: float
    all_bytes: float
    references: tuple[str, ...]
    basis: tuple[str, ...]


def expected_cost(project: Project, case: Case) -> ExpectedCost:
    """Return what the case will need here. Raises `Damaged` where the stored costs are."""
    costs, cpus = read_costs(project.root), usable_cpus()
    stored, speed = _stored(project, case), relative_speed(project, costs)
    estimated, derives = estimate(case, costs, stored), not (stored.tolerance and stored.parity_tolerance)
    measured = _measured(project, case)
    case_cpu_s = measured.cpu_s if measured is not None else estimated.case_cpu_s * speed
    witness_cpu_s = estimated.witness_cpu_s * speed
    busy = min(cpus, case.world_size)
    wall_s = START_S + (case_cpu_s / busy if measured is None else measured.seconds) + witness_cpu_s
    source = (
        f"measured: the CPU seconds of the case, in its last run here ({measured.seconds:.1f} s wall)"
        if measured is not None
        else f"estimated: from {costs.cases_fitted} cases measured on {costs.cpu} (typical error "
        f"{costs.typical_error:.0%}), times {speed:.2g} for this machine"
    )
    return ExpectedCost(
        wall_s=wall_s,
        cpus=cpus,
        case_cpu_s=case_cpu_s,
        witness_cpu_s=witness_cpu_s,
        process_bytes=estimated.process_bytes,
        all_bytes=estimated.all_bytes,
        references=estimated.references,
        basis=(source, *_assumptions(case, estimated), *[_DERIVING] * derives),
    )


def _stored(project: Project, case: Case) -> Stored:
    """Return which tolerances of a case are stored. Whether a golden is depends on the machine."""

    def is_stored(read: Callable[[Case, Path], Tolerance]) -> bool:
        with contextlib.suppress(ToleranceMissing):
            return read(case, project.root) is not None
        return False

    if expected_refusal(case) is not None:
        return ALL_STORED
    return Stored(tolerance=is_stored(tolerance_for), parity_tolerance=is_stored(parity_tolerance_for))


def _assumptions(case: Case, estimated: Estimate) -> tuple[str, ...]:
    memory = "estimated: memory, from the sizes of parameters, optimizer, saved tensors and records"
    if not estimated.rough:
        return (memory,)
    size, rate = f"{parameter_count(case) / 1e6:.0f} million parameters", f"{FLOPS_PER_CPU_S / 1e9:.0f} GFLOP"
    work = f"{rate} per CPU second, {FLOPS_PER_PARAMETER_AND_TOKEN} FLOP per parameter and token"
    return (f"rough: {size} are more than was measured; assumed: {work}", memory)


def _measured(project: Project, case: Case) -> CaseResult | None:
    name = case_id(case)
    results = (RunStore(path).result_of(name) for path in reversed(project.stored_runs()))
    return next((result for result in results if result is not None and result.cpu_s), None)


def recorded_costs(project: Project, cases: Sequence[Case], ahead: Sequence[Reference]) -> dict[str, float]:
    """Return the CPU seconds of cases and references by name, where recorded costs tell them: those of Llamas."""
    try:
        costs = read_costs(project.root)
    except HarnessError:
        return {}
    of_cases = {case_id(case): costs.case_s(case) for case in cases if is_llama(case.target)}
    return of_cases | {each.name: costs.reference_s(each) for each in ahead if is_llama(each.case.target)}


def cases_within(
    project: Project, cases: Sequence[Case], selections: Sequence[Selection], budget_s: float
) -> choice.Budgeted:
    """Return the cases to run in `budget_s` seconds of wall clock. Raises `NothingSelected` when not even one fits."""
    costs = read_costs(project.root)
    cpus = usable_cpus()
    budget_cpu_s = max(0.0, budget_s - START_S) * cpus * _BUSY / relative_speed(project, costs)

    def price(case: Case) -> choice.Price:
        return costs.price(case, _stored(project, case))

    budgeted = choice.within_budget(cases, selections, price, faults=choice.planted_faults(), budget_cpu_s=budget_cpu_s)
    if not budgeted.cases:
        raise NothingSelected(
            f"no case fits into {budget_s:g} s, of which {START_S:g} s are for starting.",
            where="--budget-s",
            fix="give more seconds.",
        )
    return budgeted


def relative_speed(project: Project, costs: Costs) -> float:
    """CPU seconds that cases took here, by the last stored run, per second that the costs say; 1 where none tells."""
    for path in reversed(project.stored_runs()):
        ratios = [
            result.cpu_s / costs.case_s(parse_case_id(result.case_id))
            for result in RunStore(path).read().results
            if result.verdict is Verdict.PASSED and result.expectation is None and result.cpu_s
        ]
        if len(ratios) >= _FEWEST:
            return statistics.median(ratios)
    return 1.0
