"""The record of a run: its environment, how it started, the result of every case with its numbers, and how it ended.

`store.py` writes each of `RunStart`, `CaseResult` and `RunEnd` as its own line; everything that is shown, compared
or merged is read from a `RunResult`. What the ranks recorded in full is not kept.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Self

import msgspec

from harness.headline import Headline, headline_of
from harness.run_options import RunOptions
from harness.text import changed_facts
from harness.trace import RankFailure, Run
from harness.verdict import ExitCode, FailureSignature, Finding, GoldenSource, NotJudged, Verdict, exit_code


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run was made with, as `running/identity.py` finds it. Names no user, host or path."""

    packages: Mapping[str, str] = {}  # versions of fp8-harness, torch, torchao, numpy, …; python
    contents: Mapping[str, str] = {}  # digests of the sources of packages that are installed from a checkout
    targets: Mapping[str, str] = {}  # digests of the sources of the user's own targets
    injected: tuple[str, ...] = ()  # what --inject calls in every rank, each with a digest of its file
    device: str = ""  # "cpu" or the name of the GPU
    architecture: str = ""  # of the GPU: "sm90"
    driver: str = ""  # of the GPU
    cpu: str = ""  # model and extensions
    threads: int = 0  # that this process may use
    limits: str = ""  # environment variables that limit the arithmetic of a CPU
    platform: str = ""  # "Linux x86_64"
    launcher: str = ""
    backend: str = ""  # what collectives ran on: "shared", "gloo" or "nccl"
    arithmetic: str = ""  # "kernel" or "exact" where it is not the usual one of the device
    program: str = ""  # of the ranks
    commit: str = ""  # of the project with the cases; ends in "-dirty" where tracked files differ from it
    changes: str = ""  # digest of these differences
    upstream: tuple[str, ...] | None = None  # changes of torch by name that its packages have; None: it does not say

    @property
    def fingerprint(self) -> str:
        """Equal where every field is: numbers of a CPU must then be equal too."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    @property
    def short_commit(self) -> str:
        """The first characters of the commit, with "+" where tracked files differ from it; empty without git."""
        commit, dirty, _ = self.commit.partition("-dirty")
        return "" if commit == "unknown" else f"{commit[:9]}{'+' if dirty else ''}"

    def differences(self, other: Self) -> tuple[str, ...]:
        """Return what differs, each as "torch 2.12.0 -> 2.13.0"; empty if nothing does."""
        mine, others = self.words, other.words
        return changed_facts(mine, others, dict.fromkeys((*mine, *others)))

    @property
    def words(self) -> Mapping[str, str]:
        """Every fact under one name: packages by theirs, sources as "torchao sources". `upstream` follows from them."""
        facts = {name: str(getattr(self, name)) for name in self.__struct_fields__ if name not in _SEVERAL}
        sources = {f"{name} sources": digest for name, digest in (*self.contents.items(), *self.targets.items())}
        injected = {"injected": "; ".join(self.injected)}
        named = {**self.packages, **sources, **facts, **injected}
        return {name: value for name, value in named.items() if value not in ("", "0")}


_SEVERAL = ("packages", "contents", "targets", "injected", "upstream")


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss (nats) and global gradient norm of every step."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


class CastRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The casts to float8 of one operand of a linear in one step, over all ranks and phases."""

    fqn: str
    role: str  # "input", "weight", "grad_output"
    step: int  # 1-based
    amax: float  # of the high-precision tensor
    scale_min: float
    scale_max: float
    saturated: float  # share of the elements whose scaled magnitude exceeds the largest float8 value
    flushed: float  # share of the elements that are not zero and became zero

    @property
    def lost(self) -> float:
        """The share of elements that lost their value; infinite where it is not known."""
        lost = self.saturated + self.flushed
        return math.inf if math.isnan(lost) else lost


class Sent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one kind, of all ranks and steps. `payload_bytes` is the sum of the inputs of all ranks."""

    calls: int
    payload_bytes: int


class Multiplied(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Products of one kind, of all ranks and steps: evaluation, recomputation and padding are among them."""

    calls: int
    flops: int


def sent_by(words: Iterable[tuple[str, int, int]]) -> Mapping[str, Sent]:
    return {name: Sent(calls=calls, payload_bytes=nbytes) for name, (calls, nbytes) in _sums(words).items()}


def multiplied_by(words: Iterable[tuple[str, int, int]]) -> Mapping[str, Multiplied]:
    return {name: Multiplied(calls=calls, flops=flops) for name, (calls, flops) in _sums(words).items()}


def _sums(words: Iterable[tuple[str, int, int]]) -> Mapping[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for name, first, second in words:
        before = sums.get(name, (0, 0))
        sums[name] = (before[0] + first, before[1] + second)
    return dict(sorted(sums.items()))


class Speedup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much faster a case trains than its BF16 counterpart: paired ratios of seconds, with their 95 % interval.

    Tokens a second are of one device, in the median pair.
    """

    twin: str  # id
    pairs: int
    ratio: float  # above 1: faster
    low: float
    high: float
    tokens_per_s: float
    twin_tokens_per_s: float


class WorstGradient(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gradient that is furthest from the reference's, relative to its norm, and how far it may be."""

    fqn: str
    step: int  # 1-based
    distance: float
    allowed: float | None  # None: there is no tolerance for cases like this


class Errors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative distances by parameter or module, of every step: None where nothing was compared."""

    steps: tuple[int, ...]  # 1-based
    rows: Mapping[str, tuple[float | None, ...]]
    tolerance: tuple[float, ...] = ()  # of every step, where one holds for all rows


class Timeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The collectives of one rank in one step, in order. A call: its kind by number, start in ms, input bytes."""

    rank: int
    step: int  # 1-based
    kinds: tuple[str, ...]  # "all_gather in uint8 along dp_shard"
    calls: tuple[tuple[int, float, int], ...]


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that are followed over runs. None, or empty: not recorded, or not compared.

    `curves` are of "case" and of what it was compared with: "golden" (BF16) and "solo" (the same recipe on one rank).
    `digests` are equal where every bit is: of "casts", "matmuls", "gradients" and "parameters".
    """

    curves: Mapping[str, Curve] = {}
    loss_distance: float | None = None  # the largest from the golden, in nats
    parity: float | None = None  # the largest relative distance of a gradient from solo
    module_replay: float | None = None  # the largest relative distance of a tensor of a module from its replay
    flushed: float | None = None  # the share of all values that casts to float8 made zero; None: no cast was recorded
    scaled_mm_calls: int | None = None  # of all ranks and steps
    flops: Mapping[str, Multiplied] = {}  # by part and precision: "matmuls in float8", "attention in bfloat16"
    wire: Mapping[str, Sent] = {}  # by kind, dtype and mesh axis: "all_gather in uint8 along dp_shard"
    saved_bytes: int | None = None  # for backward, of all ranks and steps
    speedup: Speedup | None = None  # of `predict measure` alone
    fused: Mapping[str, int] = {}  # executions of fused operators, of all ranks and steps
    digests: Mapping[str, str] = {}

    @property
    def wire_bytes(self) -> int | None:
        """Inputs of all collectives of all ranks and steps; None if none were recorded."""
        return sum(sent.payload_bytes for sent in self.wire.values()) if self.wire else None


class Measured(Numbers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of one run.

    Of a cast in a compiled graph it is known neither in which block it is nor how much it flushes: it counts in
    `digests` alone. `peak_memory_bytes`, `step_s` and `timeline` never repeat exactly, so nothing compares them.
    """

    allowed_loss: tuple[float, ...] = ()  # nats from the golden, of every step
    worst_gradient: WorstGradient | None = None
    logprobs: tuple[float, float] | None = None  # largest and mean distance from one rank, of the last step, in nats
    same_bits: bool | None = None  # every gradient and updated parameter has those of one rank; None: not compared
    expected_flops: Mapping[str, Multiplied] = {}  # by the formula; empty where it does not apply
    expected_wire: Mapping[str, Sent] | None = None  # by the formula, where one applies, without `limited_wire`
    limited_wire: tuple[str, ...] = ()  # kinds of which the formula gives only limits
    expected_saved_bytes: int | None = None  # by the formula; None where there is none, or where it gives only limits
    gradient_errors: Errors | None = None  # from the single-rank reference
    replay_errors: Errors | None = None  # of modules from their replay, the largest of their tensors
    timeline: Timeline | None = None  # of the lowest rank in the last step
    casts: tuple[CastRange, ...] = ()
    cast_calls: int | None = None  # casts of all ranks and steps, by linears; None if compiled code casts
    expected_cast_calls: int | None = None  # by the formula; None if it does not apply
    peak_memory_bytes: int | None = None  # of the rank with most. CUDA: allocator; CPU: growth of the resident set
    step_s: tuple[float, ...] = ()  # of every step, of the slowest rank, with all that probes take


SCHEMA: Literal[5] = 5


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at running a case. It is retried only after an attempt that ended as `infra`."""

    verdict: Verdict
    message: str
    wall_s: float
    cpu_s: float
    detected_s: float | None = None  # from the start to the detection of the first failure
    nodes: tuple[str, ...] = ()  # of a cluster: where its ranks ran


class WithFix(msgspec.Struct, frozen=True, kw_only=True):
    """The second run of a case with a recorded fault: with the candidate fixes, checked by every check."""

    fixes: tuple[str, ...]  # "cases/fixes/scattered_rows.py:apply"
    verdict: Verdict
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]


class ReferenceRun(msgspec.Struct, frozen=True, kw_only=True):
    """A reference that cases were compared with, such as "solo single-rowwise-v2048-f64".

    `asked`: by how many cases. `ran`: how often it had to be run; 0 where it was kept. `stored`: it is kept since.
    """

    kind: str
    name: str
    asked: int = 1
    ran: int = 1
    cpu_s: float = 0.0
    stored: bool = False
    retried: tuple[str, ...] = ()  # why earlier attempts ended, each a fault of the machine


class RunStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="start"):
    """What is known of a run before its first rank starts.

    `cases` are ids in the order of selection; those in `left_out` did not fit into the budget. `environment` is null
    for a run of several environments. `started` is UTC in ISO 8601. `shard` is "2/4" for a part of the selection.
    `argv` is the command line that runs these cases in this way.
    """

    schema: Literal[5] = SCHEMA
    cases: tuple[str, ...] = ()
    options: RunOptions = RunOptions()
    environment: Environment | None = None
    name: str = ""  # given by the user
    started: str = ""
    left_out: tuple[str, ...] = ()
    shard: str = ""
    argv: tuple[str, ...] = ()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a case ran on a machine with GPUs, and why not on these. `idle`: GPUs that `dev evidence` could verify."""

    device: str  # "cpu" or the name of the GPUs
    gpus: int = 0  # that the run had
    exact: bool = False  # with the exact matmul, which nobody asked for
    why: str = ""
    idle: str = ""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="case"):
    """The result of one case.

    `losses` (nats) and `grad_norms` are those of the lowest rank that finished; empty if none did. `expectation` is the
    refusal or known fault that it must show. `checks` ran, in this order; `not_judged` did not. The tolerance of those
    in `derived` was derived, because none was measured for such cases. `command` runs only this case again. What is
    null was not there: no rank finished, nothing failed, nothing is recorded, there are no GPUs.
    """

    case_id: str = msgspec.field(name="id")
    verdict: Verdict
    findings: tuple[Finding, ...]
    attempts: tuple[Attempt, ...]
    world_size: int
    expectation: str | None = None
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    checks: tuple[str, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    golden: GoldenSource = ""  # what the losses were compared with
    golden_losses: tuple[float, ...] = ()  # nats; empty if nothing was compared
    derived: tuple[str, ...] = ()
    command: str = ""
    failure_signature: FailureSignature | None = None  # None if nothing failed, or nothing was found out
    measured: Measured | None = None  # None if no rank finished
    with_fix: WithFix | None = None  # None: no fault with a candidate fix is recorded for it, or it does not show
    quarantined: str = ""  # until when, by whom and why it fails no run; empty if it counts
    unreleased: str = ""  # the unreleased builds it ran with, "torch 2.16.0.dev20261120"; empty with releases
    place: Place | None = None  # None without GPUs, with --device cuda, and where the case did not run
    run: Run | None = None  # what ranks reported, until it is stored: no line has it

    @property
    def ran(self) -> bool:
        """False for a case that the run never got to."""
        return self.verdict is not Verdict.NOT_RUN

    @property
    def good(self) -> bool:
        return self.verdict.good

    @property
    def excused(self) -> bool:
        """True if it is not good and counts against no run: it is quarantined, or only differs from a formula.

        The latter with an unreleased build alone: a release can be verified, once for all who use it.
        """
        differs = bool(self.unreleased) and self.verdict is Verdict.CHANGED
        return self.ran and not self.good and (bool(self.quarantined) or differs)

    @property
    def headline(self) -> str:
        """The first of the three lines: what is wrong; empty if nothing is."""
        return self.three_lines.what

    @property
    def three_lines(self) -> Headline:
        """What is wrong, why we say so and what to do next; empty if nothing is."""
        fixed = self.with_fix is not None and self.with_fix.verdict is Verdict.PASSED
        return headline_of(self.findings, command=self.command, ranks=self.world_size, fixed=fixed)

    @property
    def seconds(self) -> float:
        """Wall seconds of all attempts."""
        return sum(attempt.wall_s for attempt in self.attempts)

    @property
    def cpu_s(self) -> float:
        """User + system seconds of all ranks and attempts."""
        return sum(attempt.cpu_s for attempt in self.attempts)


class CaseNumbers(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="case"):
    """What `history` follows of the line of a case: much faster to read than all of it."""

    verdict: Verdict
    seconds: float
    measured: Numbers | None


class RunEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="end"):
    """What is known of a run when it ends."""

    wall_s: float = 0.0  # of all its parts, where it was resumed
    harness_cpu_s: float = 0.0  # of the controller and what it started on this machine, without ranks
    interrupted: bool = False
    provenance: dict[str, str] = {}
    references: tuple[ReferenceRun, ...] = ()


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, with its cases in the order of selection."""

    results: tuple[CaseResult, ...]
    start: RunStart = RunStart()
    end: RunEnd = RunEnd()
    damaged: Mapping[str, str | None] = {}  # what could not be read of its file, with the case that it names

    @property
    def exit_code(self) -> ExitCode:
        if self.end.interrupted:
            return ExitCode.INTERRUPTED
        if self.start.shard and not self.results:  # more shards than cases
            return ExitCode.GOOD
        return exit_code([Verdict.PASSED if result.excused else result.verdict for result in self.results])

    @property
    def cpu_s(self) -> float:
        """User + system seconds of the ranks of all cases, without witnesses."""
        return sum(result.cpu_s for result in self.results)

    @property
    def all_cpu_s(self) -> dict[str, float]:
        """User + system seconds of all processes: ranks of cases, ranks of references, and the harness itself."""
        references_s = sum(reference.cpu_s for reference in self.end.references)
        return {"cases": self.cpu_s, "references": references_s, "harness": self.end.harness_cpu_s}

    @property
    def totals(self) -> dict[str, int]:
        """The number of cases of every verdict."""
        return verdict_totals([result.verdict for result in self.results])

    @property
    def check_totals(self) -> dict[str, int]:
        """How many checks were checked over all cases, and how many were not."""
        return {
            "judged": sum(len(result.checks) for result in self.results),
            "not_judged": sum(len(result.not_judged) for result in self.results),
        }


def verdict_totals(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return the number of cases of every verdict, zeros too, in the order of `Verdict`."""
    return {verdict.value: verdicts.count(verdict) for verdict in Verdict}
