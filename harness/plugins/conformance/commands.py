"""`fp8-harness dev conformance`: its report of operators by placements, known deviations and failures, and its JSON."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from harness.cli.options import json_option, print_note, print_report
from harness.engine.cluster import Cluster
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.hardware import capacity_here, open_leases
from harness.engine.node import LocalNode
from harness.hints import LIST_CHECKS
from harness.jsonform import read_json
from harness.plugins.conformance.checks import OperatorCheck, select_checks, shard_kind
from harness.plugins.conformance.judge import KNOWN, PROGRAM, Conclusion, Status, run_checks
from harness.project import leases_in, state_folder
from harness.report.sections import Entry, Section, Table
from harness.running.machine import check_ranks
from harness.running.plan import parse_injection
from harness.running.selection import NothingSelected
from harness.sources import installed_version
from harness.text import counted
from harness.verdict import ExitCode

COLUMNS = ("R", "S0", "S1", "S2", "uneven", "empty", "Psum", "Pavg", "Pmax", "Pmin", "2-D", "strided")
_LEGEND = """\
Rows: operators; .d0 is the dim, k means keepdim. Columns: placements of the inputs (R is replicated, S0 Shard(0), Psum
Partial(sum)), uneven or empty shards, 2-D meshes, strided shards. Cells count checks: 12 passed, 2k show a known
deviation, 1F failed, 1U passed although a known deviation should show; - means no check."""
_MARKS = {"passed": "", "known": "k", "failed": "F", "unexpected_pass": "U"}


class CheckDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A check: its id, row and column, and the result."""

    id: str
    op: str
    placement: str
    status: Status
    wire_bytes: float = 0.0
    cheapest_bytes: float = 0.0
    deviations: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class ConformanceDocument(msgspec.Struct, frozen=True, kw_only=True):
    software: dict[str, str | None]
    seconds: float
    counts: dict[str, int]
    checks: tuple[CheckDocument, ...]


def conformance_document(
    conclusions: Sequence[Conclusion], *, software: dict[str, str | None], seconds: float
) -> ConformanceDocument:
    """Return all checks with their problems."""
    checks = tuple(
        CheckDocument(
            id=conclusion.check.id,
            op=conclusion.check.row,
            placement=column(conclusion.check),
            status=conclusion.status,
            wire_bytes=conclusion.wire_bytes,
            cheapest_bytes=conclusion.cheapest_bytes,
            deviations=conclusion.deviations,
            problems=tuple(map(str, conclusion.problems)),
        )
        for conclusion in conclusions
    )
    counts: Counter[str] = Counter(check.status for check in checks)
    return ConformanceDocument(software=software, seconds=round(seconds, 1), counts=dict(counts), checks=checks)


def column(check: OperatorCheck) -> str:
    """Return the column of a check: the most specific of `COLUMNS` that its inputs have."""
    placements = [placement for input_placements in check.inputs for placement in input_placements]
    if len(check.axes) > 1:
        return "strided" if any(placement[0] == "T" for placement in placements) else "2-D"
    kind = shard_kind(check)
    pending = [placement for placement in placements if placement[0] == "P"]
    sharded = [placement for placement in placements if placement != "R"]
    return next(iter(pending or ([kind] if kind != "even" else sharded)), "R")


def conformance_section(document: ConformanceDocument) -> Section:
    """Return the table, the known deviations that occurred, and unexpected results."""
    shown = Counter(name for check in document.checks if check.status == "known" for name in check.deviations)
    counts = ", ".join(f"{count} {status}" for status, count in sorted(document.counts.items()))
    software = ", ".join(f"{name} {version or 'missing'}" for name, version in document.software.items())
    return Section(
        name="conformance",
        title="Conformance",
        blocks=(
            _grid(document),
            " ".join(_LEGEND.split()),
            Table(
                title="known deviations, with the number of checks that show them",
                rows=tuple(
                    (str(shown[deviation.name]), f"{deviation.name}: {deviation.reason} ({deviation.link})")
                    for deviation in KNOWN
                    if shown[deviation.name]
                ),
                right=(0,),
            ),
            *(
                Entry(title=f"{check.id}: {check.status} {' '.join(check.deviations)}", lines=check.problems)
                for check in document.checks
                if check.status in ("failed", "unexpected_pass")
            ),
            f"{counted(len(document.checks), 'check')} in {document.seconds:.1f} s ({software}): {counts}",
        ),
    )


def _grid(document: ConformanceDocument) -> Table:
    counts: dict[str, dict[str, Counter[str]]] = {}
    for check in document.checks:
        counts.setdefault(check.op, {}).setdefault(check.placement, Counter())[check.status] += 1
    shown = [name for name in COLUMNS if any(name in row for row in counts.values())]
    return Table(
        columns=("operator", *shown),
        rows=tuple(
            (name, *(_cell(row.get(placement, Counter())) for placement in shown)) for name, row in counts.items()
        ),
        right=tuple(range(1, len(shown) + 1)),
    )


def _cell(counts: Counter[str]) -> str:
    return " ".join(f"{counts[status]}{mark}" for status, mark in _MARKS.items() if counts[status]) or "-"


def read_section(file: Path) -> Section:
    """Return the section of a page, from what `dev conformance --json` wrote. HarnessError for another file."""
    return conformance_section(read_json(file, ConformanceDocument, command="dev conformance --json"))


_EPILOG = """\b
Examples:
  fp8-harness dev conformance '*-m2x2-*'  the checks on a 2 x 2 mesh
  fp8-harness dev conformance --inject fix.py:apply
      apply your patch in every rank first

\b
Exit codes: 0 good, 1 a check failed or a known deviation no longer occurs.
"""


@click.command("conformance", epilog=_EPILOG)
@click.argument("globs", metavar="[CHECK-ID|GLOB]...", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="Print the ids of the checks and exit.")
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="Call this first in every rank. Repeatable.")
@json_option("the table")
def conformance_command(globs: tuple[str, ...], listed: bool, inject: tuple[str, ...], json_file: Path | None) -> int:
    """Check DTensor's sharding strategies for the operators of FP8 training, on four CPU ranks."""
    checks = select_checks(globs)
    if not checks:
        raise NothingSelected("no check matches.", where=" ".join(globs), fix=f"see `{LIST_CHECKS}`.")
    if listed:
        click.echo("\n".join(check.id for check in checks))
        return ExitCode.GOOD
    check_ranks()
    injections = [parse_injection(text).patch for text in inject]
    leases = open_leases(leases_in(state_folder()), "cpu")
    node = LocalNode(lambda options: ForkServerEngine(PROGRAM, options, print_note), leases, capacity_here("cpu"))
    with Cluster([node], note=print_note) as engine:
        started = time.perf_counter()
        conclusions = run_checks(engine, checks, injections)
        seconds = time.perf_counter() - started
    software = {name: installed_version(name) for name in ("torch", "torchao")}
    document = conformance_document(conclusions, software=software, seconds=seconds)
    print_report([conformance_section(document)], json_file, document)
    return ExitCode.GOOD if all(conclusion.good for conclusion in conclusions) else ExitCode.FAILED
