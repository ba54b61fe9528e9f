"""The planted faults: bugs of real FP8 training stacks, reproduced to measure which checks detect them.

`faults.toml` lists the name, scope and effect of each; `harness/plugins/faults/worker/` has the code that plants it.
"""

import difflib
import functools
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from harness.errors import HarnessError
from harness.hints import LIST_FAULTS
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.rules import expected_refusal
from harness.matrix.selector import parse_selector
from harness.registry import REFERENCE, is_llama
from harness.verdict import Finding

FaultClass = Literal["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M"]
FAULT_CLASSES: dict[FaultClass, str] = {
    "A": "scale or amax over the wrong data or group",
    "B": "stale scale or stale FP8 data",
    "C": "wrong set of modules converted",
    "D": "communication, DTensor and FSDP plumbing",
    "E": "recompute, kernels and saved memory",
    "F": "shapes, padding, hardware rules",
    "G": "gradients, data, optimizer, metrics",
    "H": "compiled blocks and async TP",
    "I": "memory that is kept for too long",
    "J": "blocks of MXFP8 and their scales",
    "K": "experts, and what is sent to them",
    "L": "pipelines: stages, microbatches, and what is sent between them",
    "M": "context parallelism: positions, attention to other ranks' tokens, and what a loss is divided by",
}

# The first thing that a fault changes where it applies; tests verify it for every fault.
#   numbers  losses or gradient norms      matmuls  conversion or the number of scaled matmuls    data  the data digest
#   operands only casts                    traffic  only collectives                              memory  saved bytes
#   graphs   what is compiled or fused     state  what the target leaves changed              resumed  what was loaded
#   experts  what experts record           crash  a rank raises                       trains   a refused case trains
#   nothing  equivalent
Shows = Literal[
    "numbers",
    "matmuls",
    "data",
    "operands",
    "traffic",
    "memory",
    "graphs",
    "experts",
    "state",
    "resumed",
    "crash",
    "trains",
    "nothing",
]

# What a fault needs, by its `model`: not every one can be planted at a seam of torch, torchao or the harness.
NEEDS = {
    "any": "a case that it applies to",
    "llama": "a target that trains the Llama of the cases",
    "reference": "the reference target, whose code it changes",
}

PREFIX = "fault:"  # `fault:NAME` is the injection that plants a fault


Texts = str | tuple[str, ...]


class Headline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the first finding about a planted fault must name: one of these patterns each, where there are any.

    `rank`: the one that has the fault, of runs of several ranks; "all": it names none, or every one.
    """

    rule: Texts = ()
    module: Texts = ()
    operand: Texts = ()
    rank: int | Literal["last", "all"] | None = None
    step: int | None = None

    def misnamed(self, finding: Finding, world_size: int) -> tuple[str, ...]:
        """The fields of the finding that are others."""
        texts = (("rule", self.rule), ("module", self.module), ("operand", self.operand))
        wrong = [name for name, wanted in texts if wanted and not _is_one_of(getattr(finding, name) or "", wanted)]
        ranks = set(finding.ranks or ([] if finding.rank is None else [finding.rank]))
        named = {"last": {world_size - 1}, "all": ranks if len(ranks) == world_size else set()}
        if world_size > 1 and self.rank is not None and ranks != named.get(str(self.rank), {self.rank}):
            wrong.append("rank")
        if self.step is not None and finding.step != self.step:
            wrong.append("step")
        return tuple(wrong)


def _is_one_of(text: str, patterns: Texts) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in ((patterns,) if isinstance(patterns, str) else patterns))


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planted fault.

    `where`: its scope, selectors one of which a case must match. `since_step`: the first step in which anything can
    differ. `model`: which targets have what it changes. `equivalent`: why the fault has no observable effect (an
    equivalent mutant); None if it must be detected. `headline`: where it is, as far as any host case can say that.
    """

    name: str
    group: FaultClass
    title: str
    link: str  # the bug report, fix or project that it comes from
    where: tuple[str, ...]
    model: Literal["any", "llama", "reference"] = "any"
    shows: Shows = "numbers"
    since_step: int = 1
    equivalent: str | None = None
    headline: Headline | None = None

    @property
    def injection(self) -> str:
        return f"{PREFIX}{self.name}"

    def fits(self, target: str) -> bool:
        return {"any": True, "llama": is_llama(target), "reference": target == REFERENCE}[self.model]

    @property
    def unrefuses(self) -> bool:
        """True when a case that must be refused trains with it."""
        return self.shows == "trains"

    def hosts(self, *, at_most: int) -> tuple[Case, ...]:
        """Returns the first `at_most` host cases that it applies to, each of another kind; it has at least one.

        The first is the catalogue's, the second the same in bfloat16, and so on for every kind of layout.
        """
        return _hosts_of(self)[:at_most]

    def applies(self, case: Case) -> bool:
        """True if the fault can be planted in this case and has its effect there.

        A case with compiled blocks, a pipeline or context parallelism takes only scopes that name this axis: compiled
        blocks do not call what other faults patch, and in the other two their effect was not measured.
        """
        layout = case.layout
        own = (("compile", case.compile != "none"), ("pp", layout.pp > 1), ("cp", layout.cp > 1))
        to_name = {axis for axis, is_on in own if is_on}
        scopes = map(parse_selector, self.where)
        return self.fits(case.target) and any(
            scope.matches(case) and to_name <= {term.axis for term in scope.terms} for scope in scopes
        )


# The cases that faults are planted in: small world sizes that together cover all code paths. The first that a fault
# applies to is the one with the fewest ranks where there is a choice. The last one must be refused: a fault may make it
# train.
HOST_IDS = (
    "single-tensorwise-v2048-f64",
    "single-rowwise-v2048-f64",
    "fsdp2-tensorwise-v2048-f64",
    "fsdp2-tensorwise-ag.fp8-v2048-f64",
    "fsdp2-tensorwise-ag.fp8pre-v2048-f64",
    "tp2-tensorwise-v2048-f64",
    "tp2-rowwise-v2048-f64",
    "tp2-tensorwise-tpstyle.fp8-v2048-f64",
    "single-tensorwise-head.fp8-v2256-vpad128-f64",
    "tp2-tensorwise-head.fp8-v2256-vpad128-f64",
    "fsdp2-tp2-tensorwise-ag.fp8-v2048-f64",
    "hsdp2x2-tensorwise-ag.fp8-v2048-f64",
    "fsdp2-tensorwise-ac.full-v2048-f64",
    "single-rowwise-ac.op-v2048-f64",
    "single-rowwise-head.fp8-v2256-vpad128-f64",
    "fsdp2-rowwise_with_gw_hp-v2048-b16",
    "single-tensorwise-pad-v2048-gb1-sl40-f64",
    "fsdp8-tensorwise-pad-v2048-sl40-f64",
    "single-tensorwise-ac.full-graph-v2048-f64",
    "atp2-bf16-graph-v2048-b16",
    "atp2-fallback-tensorwise-tpstyle.fp8-graph-v2048-f64",
    "fsdp2-atp2-rowwise-graph-v2048-gb2-b16-tol.0.02",
    "hsdp2x2-tensorwise-v2048-f64",
    "hsdp2x2-rowwise-v2048-f64",
    "single-tensorwise-v2048-clip0.25-f64",
    "fsdp2-tensorwise-v2048-clip0.25-f64",
    "tp2-rowwise-v2048-clip0.25-f64",
    "fsdp2-tensorwise-ag.fp8pre-v2048-eval-f64",
    "tp2-rowwise-v2048-eval-f64",
    "fsdp2-tensorwise-ag.fp8pre-v2048-resume-f64",
    "fsdp4-tensorwise-v2048-resume.resharded-f64",
    "tp2-rowwise-v2048-resume.resharded-f64",
    "fsdp2-reshard.never-tensorwise-ag.fp8-v2048-f64",
    "tp2-rowwise-bias-v2048-f64",
    "fsdp2-tensorwise-ag.fp8-v2048-param.b16-b16",
    "fsdp2-tensorwise-v2048-accum2-f64",
    "tp2-rowwise-v2048-accum2-f64",
    "fsdp2-tensorwise-v2048-accum2-reduce.last-f64",
    "single-tensorwise-casts.go.e4m3-v2048-f64",
    "tp2-tensorwise-casts.go.e4m3-v2048-f64",
    "single-rowwise-casts.i.ten-v2048-f64",
    "tp2-rowwise-casts.i.ten-v2048-f64",
    "fsdp2-tensorwise-v2048-ignore.unequal-f64",
    "fsdp2-tensorwise-v2048-ignore.half-f64",
    "fsdp2-tensorwise-v2048-sgd-lr0.1-f64",
    "tp2-rowwise-v2048-sgd-lr0.1-f64",
    "hsdp2x2-tensorwise-v2048-param.b16-b16",
    "fsdp2-tp2-tensorwise-v2048-reduce.b16-b16",
    "single-tensorwise-inductor-v2048-s2-b16",
    "single-mxfp8-v2048-b16",
    "fsdp2-mxfp8-v2048-b16",
    "hsdp2x2-mxfp8-v2048-b16",
    "single-mxfp8_floor-v2048-b16",
    "single-mxfp8_with_gw_hp-v2048-b16",
    "single-mxfp8-bias-v2048-b16",
    "single-mxfp8-ac.full-v2048-b16",
    "fsdp2-mxfp8-wrapper-v2048-b16",
    "fsdp2-mxfp8-v2048-accum2-b16",
    "tp2-mxfp8-v2048-b16",
    "fsdp2-ep2-bf16-moe8-v2048-gb4-sl16-b16",
    "fsdp4-ep2-bf16-moe4-v2048-b16",
    "hsdp2x2-ep2-bf16-moe4-v2048-b16",
    "fsdp2-ep2-bf16-ac.full-moe4-v2048-b16",
    "fsdp2-ep2-rowwise-moe4-sigmoid-balance-v2048-accum2-b16",
    "fsdp2-ep2-bf16-moe4-v2048-clip0.25-b16",
    "fsdp2-ep2-bf16-moe4-balance-v2048-eval-resume-b16",
    "fsdp2-ep2-rowwise-gmm.fp8-moe4-v2048-b16",
    "fsdp2-ep2-mxfp8-gmm.fp8-moe8-v2048-gb4-sl16-b16",
    "fsdp2-tp2-ep2-bf16-moe4-balance-v2048-b16",
    "tp2-ep2-rowwise-moe4-sigmoid-balance-v2048-accum2-b16",
    "pp2-tensorwise-v2048-s3-accum4-f64",
    "pp2-tp2-gpipe-rowwise-v2048-s3-accum4-f64",
    "pp2-fsdp2-tensorwise-ag.fp8-v2048-s3-accum4-reduce.last-f64",
    "pp2-fsdp2-interleaved-mxfp8-layers.4-v2048-s3-accum4-reduce.last-b16",
    "pp2-fsdp2-rowwise-v2048-s3-accum4-reduce.last-clip0.25-f64",
    "pp2-tensorwise-v2048-s3-accum4-resume-f64",
    "pp2-tensorwise-v2048-s3-accum4-eval-f64",
    "pp2-interleaved-rowwise-layers.4-v2048-s3-accum4-resume.resharded-f64",
    "fsdp2-tensorwise-tied-v2048-f64",
    "pp2-fsdp2-rowwise-tied-v2048-s3-accum4-reduce.last-clip0.25-f64",
    "fsdp2-cp2-tensorwise-v2048-s3-f64",
    "fsdp2-cp2-contiguous-rowwise-v2048-s3-ignore.unequal-f64",
    "fsdp4-cp2-tensorwise-ag.fp8-v2048-gb16-s3-ignore.half-f64",
    "fsdp2-tp2-cp2-rowwise-v2048-s3-f64",
    "tp2-tensorwise-head.fp8-v2256-f64",
)


class HostKind(NamedTuple):
    """What decides how sharply a host case is judged: sums in another order, and how much they round."""

    layout: Literal["pipeline", "TP", "HSDP", "FSDP2", "one rank"]
    dtype: str


def host_kind(case: Case) -> HostKind:
    layout = case.layout
    if layout.pp > 1:
        return HostKind("pipeline", case.train.dtype)
    if layout.tp > 1:
        return HostKind("TP", case.train.dtype)
    if layout.dp_replicate > 1:
        return HostKind("HSDP", case.train.dtype)
    return HostKind("FSDP2" if layout.dp_shard > 1 else "one rank", case.train.dtype)


@functools.cache
def _hosts_of(fault: Fault) -> tuple[Case, ...]:
    refused = fault.shows == "trains"
    cases = [case for case in all_hosts() if fault.applies(case) and (expected_refusal(case) is not None) == refused]
    kinds: dict[HostKind, Case] = {}
    for case in cases:
        kinds.setdefault(host_kind(case), case)
    return tuple(sorted(kinds.values(), key=lambda case: _rank_of_layout(case, cases[0])))


@functools.cache
def all_hosts() -> tuple[Case, ...]:
    """The host cases of the catalogue, each followed by the same case in bfloat16."""
    return tuple(host for case in map(parse_case_id, HOST_IDS) for host in (case, _in_bfloat16(case)))


def _rank_of_layout(case: Case, first: Case) -> tuple[bool, str, bool]:
    """Sorts the layout of the first host case to the front, and within a layout bfloat16 to the end."""
    kind = host_kind(case)
    return kind.layout != host_kind(first).layout, kind.layout, case.train.dtype == "bfloat16"


def _in_bfloat16(case: Case) -> Case:
    return msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, dtype="bfloat16"))


def fault_named(name: str) -> Fault:
    """The fault of this name. Raises HarnessError with a suggestion if it does not exist."""
    known = all_faults()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"see `{LIST_FAULTS}`."
        raise HarnessError(f"no fault is named '{name}'.", where=f"{PREFIX}{name}", fix=fix)
    return known[name]


@functools.cache
def all_faults() -> Mapping[str, Fault]:
    """All planted faults by name, in the order of `faults.toml`: class A first."""
    tables = tomllib.loads(_LIST.read_text(encoding="utf-8"))
    faults = {name: msgspec.convert({"name": name, **table}, Fault) for name, table in tables.items()}
    return MappingProxyType(faults)


_LIST = Path(__file__).with_name("faults.toml")
