"""The options of `run`, each declared once: on its field here, and nowhere else.

The options of the command line and of pytest, the command that reproduces a case, the options that a rerun repeats and
`explain --list options` follow from it. Every pytest of everyone who has the harness installed reads it at its start,
so it imports next to nothing.
"""

import functools
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from harness.declared import Declaration, Declares, declared

LauncherKind = Literal["fork", "torchrun", "ray"]
AUTO = "auto"  # the cluster that RAY_ADDRESS names, or that this machine is a node of
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
_NOT_GIVEN: tuple[object, ...] = (None, (), "")


class Option(Declaration, frozen=True):
    """The declaration of an option; `options_of` fills in what its field says: `type`, `flag` and `default`.

    `flag`: where it is not the name of the field with dashes. `short`: a second spelling. `default`: what holds where
    the field is None. `variable`: of the environment, which gives it too. `pytest`: what pytest has in its place; empty
    where the plugin has `--fp8-…`. `of_run`: other commands that run cases have it by `-o`, if at all.
    `instead_of`: the field of the option that it replaces, and is never given with. `needs`: the field of another
    option, and its value.
    """

    help: str
    flag: str = ""
    short: str = ""
    metavar: str | None = None
    default: Any = None
    variable: str | None = None
    pytest: str = ""
    of_run: bool = False
    instead_of: str = ""
    needs: tuple[str, str] | None = None
    type: Any = str

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values that there are; empty if any is allowed."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def number(self) -> Any:
        return self.type.__origin__ if get_origin(self.type) is Annotated else None

    @property
    def least(self) -> int | None:
        return self.type.__metadata__[0].ge if self.number is int else None

    @property
    def takes_dash(self) -> bool:
        """Return True if "-" stands for stdout."""
        return self.metavar == "FILE|-"

    @property
    def repeatable(self) -> bool:
        """Return True if it may be given several times."""
        return get_origin(self.type) is tuple

    @property
    def pytest_flag(self) -> str:
        """Return how pytest spells it; empty if pytest does not have it."""
        return "" if self.pytest else self.flag.replace("--", "--fp8-", 1)

    @property
    def shown_default(self) -> str:
        """Return the default, for people; empty if the absence of a value is the default."""
        return "" if self.default in _NOT_GIVEN or self.default is False else str(self.default)


def _option(help: str, **said: Any) -> Any:
    """Return the declaration of an option, which stands where its field has its default."""
    return Option(help, **said)


class QueryOptions(msgspec.Struct, metaclass=Declares, frozen=True, kw_only=True):
    """Which cases. Other commands that select cases have these options too."""

    expressions: tuple[str, ...] = _option(
        "Keep cases that match: 'tp=4,8 recipe!=bf16', 'id~*ac.full*'. Repeated: all must match.",
        unset=(),
        flag="--select",
        metavar="EXPR",
    )
    keyword: str | None = _option(
        "Keep cases by id, as in pytest: 'rowwise and not tp4'.", flag="-k", metavar="EXPR", pytest="`-k`"
    )
    target: str | None = _option(
        "Train every case with this target: one of a plug-in by name, or your own module such as my_pkg.my_target.",
        metavar="NAME",
    )


class RunOptions(msgspec.Struct, metaclass=Declares, frozen=True, kw_only=True, omit_defaults=True):
    """The options that change what ranks do, as they were given; None and () where they were not.

    They are stored with a run and repeated by a rerun, and the command that reproduces a case has them.
    """

    device: Literal["auto", "cpu", "cuda"] | None = _option(
        "Where ranks train. auto: each case on GPUs if they support it, else on the CPU.", default="auto"
    )
    backend: Literal["auto", "shared", "gloo", "nccl"] | None = _option(
        "Transport of collectives. CPU: shared memory, or gloo over TCP, which sums in another order, "
        "like NCCL. CUDA: nccl. auto: shared, nccl.",
        default="auto",
        of_run=True,
    )
    launcher: LauncherKind | None = _option(
        "fork: from a process that has imported torch. torchrun: one per case, slower. ray: fork on a cluster.",
        default="fork",
        of_run=True,
    )
    address: str | None = _option(
        "The cluster for --launcher ray. Default: auto, the cluster of this machine.",
        metavar="auto|HOST:PORT",
        needs=("launcher", "ray"),
        of_run=True,
    )
    arithmetic: Literal["kernel", "exact"] | None = _option(
        "Float8 matmul: torch's kernel of the device, or the exact one with the same results on every device. "
        "Default: exact on CPU; kernel on CUDA, but exact for float64 with --device auto.",
        of_run=True,
    )
    timeout_s: PositiveFloat | None = _option(
        "Seconds per attempt at a case. Default: 120 and more, by ranks, steps, compilation and model size.",
        instead_of="timeout_factor",
        of_run=True,
    )
    timeout_factor: PositiveFloat | None = _option(
        "Multiplies the default time limit of every case, for slow or busy machines; not with --timeout-s.",
        metavar="FACTOR",
        default=1,
        instead_of="timeout_s",
        of_run=True,
    )
    # paths are absolute in what is stored
    inject: tuple[str, ...] = _option(
        "Call this in every rank before `build`.", unset=(), metavar="FILE.py:FUNCTION", of_run=True
    )

    @property
    def as_given(self) -> dict[str, Any]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in _NOT_GIVEN}

    @property
    def words(self) -> tuple[str, ...]:
        return words_of(self.as_given)

    @property
    def contradictions(self) -> Iterator[tuple[str, str, str]]:
        """Yield where options that are given exclude each other or lack another, what is wrong, and the fix."""
        given = {name: value for name, value in self.as_given.items() if value != option_named(name).default}
        for name in reversed(given):
            option = option_named(name)
            if option.instead_of in given:
                yield option.flag, f"contradicts {option_named(option.instead_of).flag}.", "give one of them."
            if option.needs is not None and getattr(self, option.needs[0]) != option.needs[1]:
                needed = " ".join(words_of(dict([option.needs])))
                yield f"{option.flag} {given[name]}", f"it is for {needed}.", f"add {needed}."

    def besides(self, given: "RunOptions") -> "RunOptions":
        """Return these options without those that are given again, and without those that the new ones replace."""
        anew = {field_name for name in given.as_given for field_name in (name, option_named(name).instead_of)}
        return RunOptions(**{name: value for name, value in self.as_given.items() if name not in anew})


class PlanOptions(RunOptions, frozen=True, kw_only=True):
    """How cases are run: what `make_plan` is given."""

    # more cases at once do not help a machine whose slots one of 8 ranks fills
    jobs: PositiveInt = _option(
        "Cases to run at the same time, as far as slots allow; on a cluster, per node.",
        unset=2,
        short="-j",
        pytest="`-n` of pytest-xdist",
        of_run=True,
    )
    slots: PositiveInt | None = _option(
        "Ranks at the same time on this machine, over all jobs; on a cluster, per node. "
        "Default: one per core, at least 10; on CUDA the visible devices.",
        of_run=True,
    )


class CommandOptions(msgspec.Struct, metaclass=Declares, frozen=True, kw_only=True):
    """Further options of `run`: which part, how long, and what to write."""

    axes: tuple[str, ...] = _option(
        "Run the case with this value of an axis, as `new` writes it, in place of a tier. Repeatable.",
        unset=(),
        flag="--set",
        metavar="AXIS=VALUE",
        pytest="none: it collects the cases of files",
    )
    shard: str | None = _option(
        "Part I of N of these cases, of nearly equal CPU seconds, the same on every machine.", metavar="I/N"
    )
    budget_s: PositiveFloat | None = _option(
        "Run the cases with the best coverage in this many seconds; the others are listed.",
        pytest="none: workers would each run the whole budget",
    )
    maxfail: PositiveInt | None = _option("Stop after this many failed cases, as in pytest.", pytest="`--maxfail`")
    first_failure: bool = _option("Stop after the first: --maxfail 1.", unset=False, flag="-x", pytest="`-x`")
    last_failed: bool = _option(
        "Run the cases that failed or never ran in the last run, with the same options.",
        unset=False,
        flag="--lf",
        pytest="`--lf`",
    )
    resume: bool = _option(
        "Finish the last run that was interrupted or killed, with the same options.", unset=False, pytest="`--lf`"
    )
    name: str = _option("A name for the stored run, such as a release.", unset="", metavar="NAME")
    environments: tuple[str, ...] = _option(
        "Run in this virtual environment. Repeatable.",
        unset=(),
        flag="--env",
        metavar="NAME=VENV",
        pytest="none: a session is in one environment",
    )
    json_file: Path | None = _option(
        "Write the results as JSON Lines.", flag="--json", metavar="FILE|-", pytest="`show --json` after it"
    )
    junit_file: Path | None = _option(
        "Write the results as JUnit XML.", flag="--junit", metavar="FILE", pytest="`--junitxml`"
    )
    markdown_file: Path | None = _option(
        "Write a summary as markdown.", flag="--markdown", metavar="FILE", pytest="`show --markdown` after it"
    )
    html_file: Path | None = _option(
        "Write one HTML file that needs no network.", flag="--html", metavar="FILE", pytest="`show --html` after it"
    )
    github: bool = _option(
        "Annotate failed cases, and write the job summary. Default: in GitHub Actions.",
        unset=False,
        flag="--github/--no-github",
        variable="GITHUB_ACTIONS",
        pytest="none: its plugins annotate failures of all tests",
    )
    keep_logs: Path | None = _option("Keep output and stack dumps of ranks.", metavar="DIR")
    durations: Annotated[int, msgspec.Meta(ge=0)] | None = _option(
        "Print the N slowest cases; 0: all.", metavar="N", pytest="`--durations`"
    )
    verbose: bool = _option(
        "Also print starts, all findings, and what was not checked and why.", unset=False, short="-v", pytest="`-v`"
    )


class AppOptions(msgspec.Struct, metaclass=Declares, frozen=True, kw_only=True):
    """What is said before the command, of every command."""

    root: str | None = _option(
        "Project root with cases/ and golden/. Default: the nearest one at or above the current folder.", metavar="DIR"
    )
    quiet: bool = _option(
        "Print nothing while cases run, only the totals and failures.", unset=False, short="-q", pytest="`-q`"
    )

    @property
    def words(self) -> tuple[str, ...]:
        return (*words_of({"root": self.root}), *(("--quiet",) if self.quiet else ()))


PARTS: tuple[type[msgspec.Struct], ...] = (QueryOptions, PlanOptions, CommandOptions, AppOptions)
TITLES = ("Which cases", "How they run", "Extent and output", "Before the command")  # of these


@functools.cache
def options_of(part: type[msgspec.Struct]) -> Mapping[str, Option]:
    """Return the options of one of `PARTS`, or of `RunOptions`, by the name of their field."""
    hints = get_type_hints(part, include_extras=True)
    return {name: _filled(name, hints[name], option) for name, option in declared(part).items()}


def option_named(name: str) -> Option:
    return next(options[name] for options in map(options_of, PARTS) if name in options)


def words_of(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the words of a command line that give these values to the options of these fields, in this order."""
    words: list[str] = []
    for name, value in values.items():
        for element in value if isinstance(value, tuple) else (value,):
            if element not in _NOT_GIVEN:
                text = str(element)
                words += (option_named(name).flag, text.removesuffix(".0") if isinstance(element, float) else text)
    return tuple(words)


def _filled(name: str, kind: Any, option: Option) -> Option:
    """Return the declaration of a field with what the field says."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (member for member in get_args(kind) if member is not types.NoneType)
    default = option.unset if option.default is None else option.default
    return msgspec.structs.replace(
        option, flag=option.flag or f"--{name.replace('_', '-')}", type=kind, default=default
    )
