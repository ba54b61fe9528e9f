"""What commands about bugs print, their JSON, and the draft of an issue."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from harness.hints import run_cases
from harness.matrix.axes import AXES, axis_values, own_axes, shown_value
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.rules import expected_refusal
from harness.plugins.bugs.bugfile import Bug, BugFile
from harness.plugins.bugs.corpus import Corpus, Proof
from harness.plugins.bugs.export import MISMATCH, Exported
from harness.plugins.bugs.export import Proof as ScriptProof
from harness.plugins.bugs.importing import ImportedBug, Job
from harness.plugins.bugs.pytest_file import ExportedTest
from harness.plugins.bugs.reading import Account
from harness.plugins.bugs.shrink import Attempt, Shrunk
from harness.plugins.bugs.spellings import shown as quoted
from harness.plugins.bugs.trials import Reproduced
from harness.plugins.bugs.upstream import Record
from harness.report.sections import Block, Entry, Facts, Items, Section, Table, Verbatim, markdown
from harness.text import counted


def bugs_sections(bugs: Sequence[BugFile]) -> list[Block]:
    """Return a table of bug files: id, status, symptom, what detects them, title."""
    rows = tuple(
        (file.id, file.bug.status, file.bug.symptom, ", ".join(file.bug.detected_by) or "-", file.bug.title)
        for file in bugs
    )
    counts = Counter(file.bug.status for file in bugs)
    totals = [f"{counts[status]} {status}" for status in ("live", "fixed", "open", "refused") if counts[status]]
    total = counted(len(bugs), "bug") + (f": {', '.join(totals)}" if totals else "")
    return [Section(blocks=(Table(rows=rows), total))]


def bug_document(bug: BugFile) -> dict[str, object]:
    """Return the JSON form of a bug file, with the id of its case."""
    return {
        "id": bug.id,
        "file": bug.where,
        "case": None if bug.case is None else case_id(bug.case),
        "runs": bug.runs,
        "bug": bug.bug,
        "missing": dict(bug.missing),
        "refused": dict(bug.refused),
    }


def imported_sections(imported: ImportedBug, *, file: str | None) -> list[Block]:
    """What was found in a report, list by list. `file`: where the bug file was written; None where nothing was."""
    bug = imported.bug
    lists = {name: _sourced(imported, name) for name in ("stated", "derived", "assumed", "missing", "refused")}
    job = imported.job
    era = f"options as of {job.era.day} ({job.era.source})"
    facts = (bug.bug.link, f"seen: {_seen(bug.bug)}", era, _counts(job.account))
    words = Items(tuple(bug.bug.report.splitlines()))
    return [
        Section(title=f"{bug.id}: {bug.bug.title}", blocks=facts),
        Section(title="in the words of the report, which are not read", blocks=(words,)),
        *(Section(title=name, blocks=(Items(lines),)) for name, lines in lists.items()),
        Section(title="changes no case", blocks=(Items(job.ignored),)),
        Section(title="not understood", blocks=(Items(tuple(line.text for line in job.account.not_understood)),)),
        Verbatim("\n".join(_next(bug, file))),
    ]


def _counts(account: Account) -> str:
    """Return how many lines were used, are without effect, and were not understood."""
    counts = {name.replace("_", " "): len(getattr(account, name)) for name in account.__struct_fields__}
    lines = counted(sum(counts.values()), "line")
    return f"{lines} of configurations: {', '.join(f'{count} {name}' for name, count in counts.items())}"


def job_notes(job: Job) -> tuple[str, ...]:
    """Return how a case differs from its job, and the account of the lines, a line each."""
    lists = (("", job.derived), ("assumed: ", job.assumed))
    notes = [f"{name}: {head}{words}" for head, table in lists for name, words in table.items()]
    not_understood = (f"not understood: {line.text}" for line in job.account.not_understood)
    return (*notes, *job.ignored, _counts(job.account), *not_understood)


def _seen(bug: Bug) -> str:
    parts = [bug.symptom.replace("_", " ")]
    parts += [f"first in step {bug.first_bad_step}"] if bug.first_bad_step else []
    parts += [bug.hardware] if bug.hardware else []
    parts += [f"{name} {version}" for name, version in bug.versions.items()]
    return f"{', '.join(parts)}{f'; {bug.message}' if bug.message else ''}"


def _sourced(imported: ImportedBug, name: str) -> tuple[str, ...]:
    """Return a list of axes with their values and where those come from; full sizes, except in `derived`."""
    case, words = imported.bug.case, getattr(imported.bug, name)
    values = {} if case is None or name in ("missing", "refused") else dict(axis_values(case))
    values = {axis: value for axis, value in values.items() if axis not in imported.bug.missing}
    if values and name != "derived":
        values |= imported.bug.full_size
    return tuple(
        f"{axis}{f' = {quoted(values[axis])}' if axis in values else ''}: "
        + (f'"{why}"' if name == "stated" else why.removeprefix(f"{quoted(values.get(axis))}: "))
        for axis, why in words.items()
    )


def _next(bug: BugFile, file: str | None) -> Iterator[str]:
    if bug.case is None:
        yield "refused: no case can have this bug"
    else:
        yield f"case: {case_id(bug.case)}"
        refusal = expected_refusal(bug.case)
        yield from [] if refusal is None else [f"it must be refused: {refusal.reason}"]
    if file is not None:
        yield f"wrote {file}"
        if bug.missing:
            yield "to do: answer each question in [case.axes], and remove its line from [missing]"
        elif bug.case is not None:
            yield f"run it: {run_cases(file)}"


def imported_document(imported: ImportedBug, *, file: str | None) -> dict[str, object]:
    bug = imported.bug
    lists = ("stated", "derived", "assumed", "missing", "refused", "full_size")
    return {
        "id": bug.id,
        "file": file,
        **msgspec.structs.asdict(bug.bug),
        "date": imported.job.era.day,
        "date_from": imported.job.era.source,
        "case": None if bug.case is None else case_id(bug.case),
        "axes": {} if bug.case is None else axis_values(bug.case),
        **{name: getattr(bug, name) for name in lists},
        "ignored": imported.job.ignored,
        "lines": imported.job.account,
    }


def reproduced_sections(reproduction: Reproduced) -> list[Block]:
    """Return the answer, with what was expected and found; then what differs from the report."""
    message = reproduction.found.message if reproduction.answer != "not reproduced" else ""
    known = (("known issue", f"{name}: {why}") for name, why in reproduction.known.items())
    found = (("expected", reproduction.expected), ("found", reproduction.found.text), ("message", message))
    facts = Facts((*found, *known))
    return [
        Section(title=f"{reproduction.answer}: {reproduction.found.case_id}", blocks=(facts,)),
        Section(title="differs from the report", blocks=(Items(tuple(reproduction.differs)),)),
    ]


def shrunk_sections(shrunk: Shrunk, *, command: str = "") -> list[Block]:
    """The smallest case and the command that runs it, what the failure needs and does not depend on, with the runs."""
    took = f"{shrunk.wall_s:.0f} s wall, {shrunk.cpu_s:.0f} s CPU"
    ended = "" if shrunk.complete else "; the budget ended it, so a smaller case may fail alike"
    facts = Facts((("was", case_id(shrunk.first)), ("failure", shrunk.signature.text), ("message", shrunk.message)))
    again = [Verbatim(f"$ {command}")] if command else []
    if not shrunk.attempts:
        title = "nothing smaller to try" if shrunk.complete else "not shrunk: the budget ended with the first run"
        fix = () if shrunk.complete else (f"that run took {took}: give a larger --budget-s.",)
        return [Section(title=title, blocks=(facts, *again)), *fix]
    first, last = axis_values(shrunk.first), axis_values(shrunk.case)
    changed = tuple(
        (name, f"{shown_value(first[name])} -> {shown_value(last[name])}") for name in AXES if first[name] != last[name]
    )
    so_far = "" if shrunk.complete else " so far"
    return [
        Section(title=f"smallest case{so_far}: {case_id(shrunk.case)}", blocks=(facts, *again)),
        Section(title="needs", blocks=tuple(_needs(shrunk))),
        *([Section(title="does not depend on", blocks=(Facts(changed),))] if changed else []),
        f"{counted(len(shrunk.attempts), 'smaller case')} tried, {shrunk.ran} run now, {took}{ended}",
    ]


def _needs(shrunk: Shrunk) -> Iterator[Entry]:
    """By axis, the other values that were tried, and what was seen with them."""
    values = axis_values(shrunk.case)
    groups: dict[str, list[Attempt]] = {}
    for attempt in shrunk.needed:
        groups.setdefault(next(iter(attempt.changes)), []).append(attempt)
    for name, attempts in groups.items():
        lines = (
            f"with {', '.join(f'{axis} {shown_value(value)}' for axis, value in attempt.changes.items())}: "
            f"{'the same' if attempt.same else attempt.result.text}  [{attempt.result.case_id}]"
            for attempt in attempts
        )
        bound = " or more" if _is_bound(name, values[name], attempts) else ""
        yield Entry(title=f"{name} {shown_value(values[name])}{bound}", lines=tuple(lines))


def _is_bound(name: str, value: object, attempts: Sequence[Attempt]) -> bool:
    """Return True when the number below alone takes the failure away, and every larger one that was tried keeps it."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    larger = [attempt.same for attempt in attempts if int(str(attempt.changes[name])) > value]
    below = any(dict(attempt.changes) == {name: value - 1} and not attempt.same for attempt in attempts)
    return below and bool(larger) and all(larger)


def shrunk_document(shrunk: Shrunk) -> dict[str, object]:
    same = ("signature", "message", "complete", "ran", "cpu_s", "wall_s", "needed", "attempts")
    return {
        "first": case_id(shrunk.first),
        "case": case_id(shrunk.case),
        "axes": own_axes(shrunk.case),
        **{name: getattr(shrunk, name) for name in same},
    }


def drafts_section(records: Sequence[Record]) -> Section:
    """Return the drafts for upstream: name, where it is reported, title."""
    rows = tuple((record.name, record.link or "not reported", record.title) for record in records)
    return Section(title="drafts", blocks=(Table(rows=rows),))


def corpus_sections(corpus: Corpus) -> list[Block]:
    """Return a table of the bugs; every mismatch and every inconclusive run; totals."""
    columns = ("bug", "case", "clean", "with fault", "detected by")
    rows = tuple(row for proof in corpus.proofs for row in _rows(proof))
    wrong = tuple(f"{proof.bug}: {text}" for proof in corpus.proofs for text in proof.mismatches)
    open_ = tuple(f"{proof.bug}: {text}" for proof in corpus.proofs for text in proof.undecided)
    return [
        Table(columns=columns, rows=rows),
        Section(title="contradicts the bug file", blocks=(Items(wrong),)),
        Section(title="inconclusive", blocks=(Items(open_),)),
        _totals(corpus),
    ]


def _rows(proof: Proof) -> Iterator[tuple[str, ...]]:
    faults = [f"{name}: {verdict.value}" for name, verdict in proof.planted.items()] or ["-"]
    clean = "not run" if proof.clean is None else proof.clean.value
    elsewhere = f"passes: only {proof.elsewhere} has it" if proof.elsewhere else "-"
    detected_by = "MISMATCH" if proof.mismatches else ", ".join(proof.detected_by) or elsewhere
    yield proof.bug, proof.case_id, clean, faults[0], detected_by
    yield from (("", "", "", fault, "") for fault in faults[1:])


def _totals(corpus: Corpus) -> str:
    counts = Counter(proof.status for proof in corpus.proofs)
    kinds = ", ".join(f"{counts[status]} {status}" for status in ("live", "fixed"))
    wrong = sum(bool(proof.mismatches) for proof in corpus.proofs)
    open_ = sum(bool(proof.undecided) for proof in corpus.proofs)
    ends = [f"{wrong} with a mismatch"] * bool(wrong) + [f"{open_} inconclusive"] * bool(open_)
    verified = ", ".join(ends) or "all match their files"
    return f"{counted(len(corpus.proofs), 'bug')}: {kinds}; {verified}; {corpus.wall_s:.0f} s"


def exported_sections(exported: Exported, proof: ScriptProof | None) -> list[Block]:
    """Return the files that were written, and what the script showed here."""
    made, script = exported.script, exported.file
    written = (
        f"{script}: {len(made.text.splitlines())} lines, {made.ranks} ranks",
        f"{script.with_suffix('.md')}: draft of an issue",
        f"run it by: {_command(exported, [str(script), *exported.patches])}",
    )
    sections: list[Block] = [Verbatim("\n".join(written))]
    if proof is not None:
        sections.append(Section(title="run here", blocks=(Verbatim(proof.text),)))
        if proof.outcome != "FAULT":
            sections.append("the script does not show the fault: it depends on something that the script leaves out.")
    return sections


def exported_test_sections(test: ExportedTest) -> list[Block]:
    """Return the test that was written, and which color it had where it was run."""
    written = f"{test.file}: {test.lines} lines, {test.model}\nrun it by: python -m pytest {test.file}"
    sections: list[Block] = [Verbatim(written)]
    for proof in test.proofs:
        wrong = "" if proof.found == proof.wanted else f", but must be {proof.wanted}"
        sections.append(Section(title=f"{proof.when}: {proof.found}{wrong}", blocks=(Verbatim(proof.text),)))
    return sections


def issue_markdown(
    exported: Exported,
    proof: ScriptProof | None,
    *,
    versions: Mapping[str, str],
    device: str,
    neighbors: Sequence[Attempt] = (),
) -> str:
    """The draft: environment, what was run, expected and found, the script, what else fails and what does not."""
    name, axes = exported.file.name, own_axes(parse_case_id(exported.case_id))
    command = _command(exported, [Path(file).name for file in (str(exported.file), *exported.patches)])
    reproduce: list[Block] = [f"[{name}]({name}) needs torch and torchao only:", Verbatim(command)]
    if proof is not None:
        reproduce += ["One of the ranks prints:", Verbatim(proof.text)]
    parts: dict[str, Sequence[Block]] = {
        "Known": [Items(exported.links)] if exported.links else [],
        "Environment": [Items((*(f"{package} {version}" for package, version in versions.items()), device))],
        "What was run": [
            ", ".join(f"`{name} = {shown_value(value)}`" for name, value in axes.items()),
            f"Case `{exported.case_id}` of fp8-harness.",
        ],
        "What is wrong": list(_divergence(exported)),
        "Reproduce": reproduce,
        "What fails, and what does not": [_neighbors(exported, neighbors)] if neighbors else [],
    }
    inside = tuple(Section(title=title, blocks=tuple(blocks)) for title, blocks in parts.items())
    return markdown([Section(title=exported.title, blocks=inside)], level=1, own=True)


def _command(exported: Exported, files: Sequence[str]) -> str:
    return " ".join(["torchrun --nproc-per-node", str(exported.script.ranks), *files])


def _divergence(exported: Exported) -> Iterator[Block]:
    finding = exported.finding
    if exported.error:
        agree = MISMATCH in exported.signature.what
        expected = "all ranks of a group call the same collective, of the same size" if agree else "it trains"
        yield Facts((("expected", expected), ("found", exported.error)))
    elif finding is None:
        yield exported.signature.what
        yield "It must be raised: no kernel can run this case."
    else:
        yield finding.first_line
        if finding.expected is not None or finding.found is not None:
            yield Facts((("expected", finding.expected or "something else"), ("found", finding.found or "nothing")))
    if exported.signature.kind == "crash" and exported.signature.where:
        yield f"Raised in {', '.join(f'`{call}`' for call in exported.signature.where)}."


def _neighbors(exported: Exported, neighbors: Sequence[Attempt]) -> Table:
    rows = [("nothing", exported.signature.text)]
    for neighbor in neighbors:
        changed = ", ".join(f"{name} = {shown_value(value)}" for name, value in neighbor.changes.items())
        signature = neighbor.result.signature
        rows.append((changed, "none: it passes" if signature is None else signature.text))
    return Table(columns=("changed", "failure"), rows=tuple(rows))
