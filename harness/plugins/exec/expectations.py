"""What a script is meant to do, as a file: options of what it trains, and counts of a step.

`exec --record FILE` writes it from a run, and `exec --expect FILE` compares a later run with it. A comment in the
script, `# fp8-harness: reduce_dtype = "bfloat16"`, means the same as a line under `[options]`;
`# fp8-harness: expect FILE` names a file.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from harness.checks.check import Rules, Stage
from harness.errors import HarnessError
from harness.hints import EXEC
from harness.matrix.case import Case
from harness.plugins.exec.request import ProcessRecord
from harness.text import counted
from harness.trace import RankTrace
from harness.verdict import Finding, Value

_COMMENT = re.compile(r"^\s*#\s*fp8-harness:\s*(?P<text>.+?)\s*$", re.MULTILINE)
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")  # of a layer

_rule = Rules("expected", Stage.MODEL)
_MEANT = f"If it is meant, record it: `{EXEC} --record FILE -- COMMAND`."
OPTION = _rule(
    "option", "{name} is {here}, and {there} is meant", key=("name",), fix=f"set {{name}} to {{there}}. {_MEANT}"
)
NOT_IN_FLOAT8 = _rule(
    "not-in-float8",
    "no operand of {module} is cast to float8, and {meant:n cast} a step are meant",
    located=True,
    fix=f"convert it: look at the filter of modules, and at the recipe. {_MEANT}",
)
_OTHER = "{what} {count:n time} a step, and {meant} are meant"
CASTS = _rule("casts", _OTHER, stage=Stage.SCALES, located=True, fix=_MEANT)
MATMULS = _rule("matmuls", _OTHER, stage=Stage.EXECUTION, located=True, fix=_MEANT)
COLLECTIVES = _rule("collectives", _OTHER, stage=Stage.COLLECTIVES, fix=_MEANT)
RULES = _rule.declared

# Options that say how long a run is, and not what it does.
_LENGTHS = frozenset({"steps", "global_batch", "seq_len", "seed", "lr"})


class Meant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is meant: options by name, rules of `unmeant.toml` that hold, other ones that may be broken, and
    counts of a step of rank 0, by words.
    """

    options: Mapping[str, str | int | float | bool] = {}
    rules: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    casts: Mapping[str, int] = {}
    matmuls: Mapping[str, int] = {}
    collectives: Mapping[str, int] = {}


def read(path: Path) -> Meant:
    """Return what a file says. Raises HarnessError where it cannot be read, or says something else."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Meant)
    except OSError as error:
        raise HarnessError(f"it cannot be read: {error.strerror}.", where=str(path), fix=_RECORD) from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise HarnessError(f"{error}.", where=str(path), fix=_RECORD) from error


_RECORD = f"write it by `{EXEC} --record FILE -- COMMAND`, and change what is meant otherwise."


def in_comments(script: Path) -> Meant | None:
    """Return what the comments of a script say; None where there is none."""
    lines = [match["text"] for match in _COMMENT.finditer(script.read_text(errors="replace"))]
    files = [text.removeprefix("expect ").strip() for text in lines if text.startswith("expect ")]
    written = "\n".join(text for text in lines if not text.startswith("expect "))
    if not lines:
        return None
    try:
        options = tomllib.loads(written)
    except tomllib.TOMLDecodeError as error:
        fix = 'write `# fp8-harness: reduce_dtype = "bfloat16"`, or `# fp8-harness: expect FILE`.'
        raise HarnessError(f"its comment is no line of TOML: {error}.", where=str(script), fix=fix) from error
    base = read(script.parent / files[0]) if files else Meant()
    rules, allowed = (tuple(options.pop(name, ())) for name in ("rules", "allowed"))
    options, rules, allowed = {**base.options, **options}, (*base.rules, *rules), (*base.allowed, *allowed)
    return msgspec.structs.replace(base, options=options, rules=rules, allowed=allowed)


def meant_by(case: Case, traces: Sequence[RankTrace]) -> Meant:
    """Return what a run does, for a file."""
    first = min(traces, key=lambda trace: trace.rank)
    return Meant(
        options={name: _plain(value) for name, value in options_of(case).items()},
        casts=_casts(first),
        matmuls=_matmuls(first),
        collectives=_collectives(first),
    )


def meant_by_records(records: Sequence[ProcessRecord]) -> Meant:
    """Return what the first rank of a command did. Raises HarnessError where nothing was recorded."""
    for record in sorted(records, key=lambda record: (record.rank, record.pid)):
        if record.case is not None and record.trace is not None:
            return meant_by(record.case, [record.trace])
    fix = "record a command whose optimizer makes a step."
    raise HarnessError("nothing was recorded.", where="--record", fix=fix)


def written(meant: Meant) -> str:
    """Return the text of the file."""
    lines = [f"# What this script does in a step. `{EXEC} --expect` finds what is otherwise."]
    for name in ("rules", "allowed"):
        if names := getattr(meant, name):
            lines.append(f"{name} = {msgspec.json.encode(names).decode()}")
    for name in ("options", "casts", "matmuls", "collectives"):
        table: Mapping[str, object] = getattr(meant, name)
        lines += [
            "",
            f"[{name}]",
            *(f"{_key(key)} = {msgspec.json.encode(value).decode()}" for key, value in table.items()),
        ]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_]+", name) else msgspec.json.encode(name).decode()


def options_of(case: Case) -> dict[str, object]:
    """Return what a case says of what is done, and not for how long, where it is not as by default."""
    parts = (case.layout, case.float8, case.checkpointing, case.train)
    named = {name: value for part in parts for name, value in asdict(part).items() if name not in _LENGTHS}
    return named | {"compile": case.compile}


def _plain(value: object) -> str | int | float | bool:
    if isinstance(value, str | int | float | bool):
        return value
    return ",".join(map(str, value)) if isinstance(value, tuple) else "none"


def differences(meant: Meant | None, case: Case, traces: Sequence[RankTrace]) -> Iterator[Finding]:
    """Yield what is otherwise than meant. Raises HarnessError for an option that nothing has."""
    if meant is None:
        return
    found = {**options_of(case), "reduce_dtype": case.reduce_dtype if case.uses_fsdp else case.train.reduce_dtype}
    for name, there in meant.options.items():
        if name not in found:
            fix = f"one of {', '.join(found)}."
            raise HarnessError(f"there is no option '{name}'.", where="what is meant", fix=fix)
        here = _plain(found[name])
        if here != there and not (name == "reduce_dtype" and case.train.reduce_dtype == there):
            fix = str(OPTION.fix).format(name=name, there=there)
            words: dict[str, Value] = {"name": name, "here": str(here), "there": str(there)}
            yield OPTION.finding(expected=str(there), found=str(here), fix=fix, values=words)
    first = min(traces, key=lambda trace: trace.rank)
    casts, lost = _by_module(_casts(first)), _by_module(meant.casts)
    for module in lost.keys() - casts.keys():
        values: dict[str, Value] = {"meant": lost[module]}
        expected = counted(lost[module], "cast")
        yield NOT_IN_FLOAT8.finding(step=_step(first), module=module, expected=expected, found="none", values=values)
    for rule, wanted, counts in (
        (CASTS, meant.casts, _casts(first)),
        (MATMULS, meant.matmuls, _matmuls(first)),
        (COLLECTIVES, meant.collectives, _collectives(first)),
    ):
        wrong = [what for what in sorted({*wanted, *counts}) if wanted and wanted.get(what, 0) != counts.get(what, 0)]
        wrong = [what for what in wrong if rule is COLLECTIVES or _module(what) in casts or _module(what) not in lost]
        for what in wrong[:1]:
            here, there = counts.get(what, 0), wanted.get(what, 0)
            more = {"notes": [f"and {len(wrong) - 1} more are otherwise"]} if len(wrong) > 1 else {}
            yield rule.finding(
                step=_step(first),
                module=_module(what) if rule is not COLLECTIVES else None,
                expected=f"{there} a step",
                found=f"{here} a step",
                values={"what": what.rpartition(": ")[2], "count": here, "meant": there},
                **more,  # type: ignore[arg-type]
            )


def _module(what: str) -> str:
    return what.partition(":")[0]


def _by_module(counts: Mapping[str, int]) -> dict[str, int]:
    modules = [(_module(what), count) for what, count in counts.items()]
    return {name: sum(count for of, count in modules if of == name) for name, _ in modules}


def _step(trace: RankTrace) -> int:
    """Return the step that is counted: the last one, when all has its state."""
    return max((step.step for step in trace.steps), default=1)


def _counted(names: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _casts(trace: RankTrace) -> dict[str, int]:
    casts = trace.operands.casts if trace.operands is not None else ()
    return _counted(
        f"{_role(cast.fqn)}: {cast.role} in {cast.phase} to {cast.target_dtype}"
        for cast in casts
        if cast.step == _step(trace)
    )


def _matmuls(trace: RankTrace) -> dict[str, int]:
    matmuls = trace.operands.matmuls if trace.operands is not None else ()
    return _counted(f"{_role(one.fqn)}: {one.gemm}" for one in matmuls if one.step == _step(trace))


def _collectives(trace: RankTrace) -> dict[str, int]:
    records = [record for record in trace.traffic or () if record.step == _step(trace)]
    words = ((f"{one.kind} {one.op}".strip() + f" of {one.dtype} along {one.axis}", one) for one in records)
    return {name: sum(one.sizes.values()) for name, one in sorted(words, key=lambda pair: pair[0])}


def _role(fqn: str) -> str:
    return _INDEX.sub("*", fqn)
