"""What `exec` says at the end: how the command ended, by which line, and what it used that a CPU lacks."""

import re
from collections.abc import Iterator, Mapping

import msgspec

from harness.headline import headline_of
from harness.plugins.exec.judge import Judged
from harness.plugins.exec.request import Absent, ProcessRecord
from harness.plugins.exec.supervise import Outcome, Stack
from harness.text import counted, format_ranks
from harness.verdict import ExitCode, Finding

_ABSENT_SHOWN = 8
_LINE = re.compile(r"\S+\.py:\d+(?=: )")
_ALONE = "let all ranks end alike, or raise what is wrong: the others were ended."
# What an exception says, and the way on.
_WAYS_ON = (
    ("ModuleNotFoundError: No module named 'triton", "run without its kernels here: no CPU runs Triton."),
    ("ModuleNotFoundError: No module named", "install it: `pip install {missing}`."),
    ("attempted relative import", "name the module, not its file: `python -m PACKAGE.MODULE`."),
    ("out of memory", "give the script a smaller model, or fewer ranks."),
    ("has ended: a GPU would wait", "let all ranks of the group make the same calls, and end together."),
    ("ImportError", "install the version of the package that the script needs."),
    ("_for_cpu.default does not have a sharding strategy", "gather keys and values: no CPU runs torch's sharded one."),
    ("CollectiveMismatch", "let all ranks of the group make the same calls: on GPUs they would wait for each other."),
    ("AcceleratorError: CUDA error: invalid device ordinal", "give `-n` as many ranks as the script uses GPUs."),
    ("MemoryError", "give the script a smaller model or batch."),
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    exit_code: int
    script_exit_code: int
    error: str  # one line with the line of the script; empty where nothing failed
    fix: str
    seconds: float
    ranks: int
    steps: int
    absent: tuple[Absent, ...]
    not_watched: tuple[str, ...]
    stacks: tuple[Stack, ...]
    records: tuple[ProcessRecord, ...]
    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()  # that were executed


def answer_of(outcome: Outcome, judged: Judged | None = None) -> Answer:
    """Return the answer to a run, with what was found where it was judged."""
    (error, fix), judged = _error(outcome), judged or Judged()
    return Answer(
        exit_code=exit_code(outcome) or (int(ExitCode.FAILED) if judged.findings else 0),
        findings=judged.findings,
        checks=judged.checks,
        script_exit_code=outcome.exit_code,
        error=error,
        fix=fix,
        seconds=outcome.seconds,
        ranks=max((1, *_sizes(outcome))),
        steps=max((record.steps for record in outcome.records), default=0),
        absent=tuple(_absent(outcome.records)),
        not_watched=tuple(dict.fromkeys(reason for record in outcome.records for reason in _not_judged(record))),
        stacks=outcome.stacks,
        records=tuple(msgspec.structs.replace(record, trace=None) for record in outcome.records),
    )


def _sizes(outcome: Outcome) -> Iterator[int]:
    """Yield how many ranks each process knew of; those that were ended from outside recorded nothing."""
    yield from (record.world_size for record in outcome.records)
    yield from (stack.rank + 1 for stack in outcome.stacks if stack.rank is not None)


def _not_judged(record: ProcessRecord) -> Iterator[str]:
    if record.not_watched:
        yield record.not_watched
    if len({*record.stepped}) > 1:
        yield "counts of casts, matmuls and collectives in a step: optimizers step in turn"
    if record.exchanged:
        yield f"what ranks hold alike: they share sequences, experts or stages by {record.exchanged}"


def exit_code(outcome: Outcome) -> int:
    """Return that of the script, or that of what ended it."""
    if outcome.ended_for == "interrupted":
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.FAILED) if outcome.ended_for else outcome.exit_code


def _error(outcome: Outcome) -> tuple[str, str]:
    """Return what went wrong, in one line, and the way on."""
    if outcome.ended_for:
        where = "; ".join(_where(stack) for stack in outcome.stacks if stack.line and _speaks(stack, outcome))
        where = where or ("before a line of the script ran" if outcome.stacks else "")
        return f"ended: {outcome.ended_for}{f': {where}' if where else ''}", _of_end(outcome)
    failed = [record for record in outcome.records if record.ended and record.exit_code]
    early = [record for record in outcome.records if record.exit_code and record.world_size > 1 and not record.ended]
    if failed and not (early and all(map(_follows, failed))):
        first = min(failed, key=lambda record: (_follows(record), record.rank))
        who = f"rank {first.rank}: " if first.world_size > 1 else ""
        alone = _ALONE if first.world_size > 1 and "exit(" in first.ended else ""
        places = [(other.rank, _LINE.match(other.ended)) for other in failed if "CollectiveMismatch" in first.ended]
        others = [f"rank {rank} at {line[0]}" for rank, line in places if line is not None and rank != first.rank]
        return f"{who}{first.ended}{'; ' if others else ''}{', '.join(others)}", _way_on(first.ended) or alone
    if early:
        ranks = format_ranks(sorted({record.rank for record in early}))
        return f"{ranks} ended with exit code {early[0].exit_code} and no exception", ""
    return (f"the command ended with exit code {outcome.exit_code}", "") if outcome.exit_code else ("", "")


def _speaks(stack: Stack, outcome: Outcome) -> bool:
    return stack.rank is not None or all(other.rank is None for other in outcome.stacks)


def _where(stack: Stack) -> str:
    who = "" if stack.rank is None else f"rank {stack.rank} "
    return f"{who}at {stack.line}{f' in {stack.call}' if stack.call else ''}"


def _of_end(outcome: Outcome) -> str:
    if "--timeout" in outcome.ended_for:
        return "ranks at different lines wait for each other; at the same one, give it more time or smaller sizes."
    return "give the script smaller sizes, or more memory." if "--memory" in outcome.ended_for else ""


def _follows(record: ProcessRecord) -> int:
    """Return 1 for a rank that waited for one that had ended, 2 for a launcher, which only tells that a rank failed."""
    if "ChildFailedError" in record.ended or "ProcessRaisedException" in record.ended:
        return 2
    return int("has ended: a GPU would wait" in record.ended)


def _way_on(error: str) -> str:
    for words, fix in _WAYS_ON:
        if words in error:
            missing = error.partition("No module named '")[2].partition("'")[0].partition(".")[0]
            return fix.format(missing=missing)
    return ""


def _absent(records: tuple[ProcessRecord, ...]) -> Iterator[Absent]:
    """Yield what was used, each once, with the calls of all processes together."""
    found: dict[tuple[str, str], Absent] = {}
    for record in records:
        for absent in record.absent:
            before = found.get((absent.name, absent.effect))
            calls = absent.calls + (before.calls if before else 0)
            found[absent.name, absent.effect] = msgspec.structs.replace(before or absent, calls=calls)
    yield from sorted(found.values(), key=lambda absent: (absent.effect != "raised", absent.name))


def lines(answer: Answer, words: Mapping[str, str]) -> Iterator[str]:
    """Yield what is printed behind the output of the command."""
    took = f"{answer.seconds:.0f} s"
    trained = counted(answer.steps, "step") if answer.steps else "no optimizer made a step"
    yield f"exec: {counted(answer.ranks, 'rank')} of a pretended {words['gpu']}, {trained}, {took}"
    if answer.checks and not answer.findings:
        names = ", ".join(answer.checks)
        yield f"exec: {counted(len(answer.checks), 'check')} of the first steps found nothing: {names}"
    for text in headline_of(answer.findings, command="", ranks=answer.ranks).texts:
        yield f"exec: {text}"
    for reason in answer.not_watched:
        yield f"exec: not checked: {reason}"
    if answer.absent:
        shown = [f"{absent.name} {absent.effect} ({absent.line or 'a package'})" for absent in answer.absent]
        more = f", and {len(shown) - _ABSENT_SHOWN} more" if len(shown) > _ABSENT_SHOWN else ""
        yield f"exec: of a GPU, a CPU lacks: {'; '.join(shown[:_ABSENT_SHOWN])}{more}"
    if answer.error:
        word = "error" if answer.exit_code else "a process of it ended, and the command went on"
        yield f"exec: {word}: {answer.error}{f' Fix: {answer.fix}' if answer.fix else ''}"
