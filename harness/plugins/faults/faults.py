"""The injected faults: bugs of real FP8 training stacks, reproduced to measure which checks detect them.

`faults.toml` lists the name, scope and effect of each; `harness/plugins/faults/worker/` has the code that injects it.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from harness.errors import HarnessError
from harness.hints import LIST_FAULTS
from harness.matrix.axes import suggestion
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.selector import parse_selector
from harness.registry import REFERENCE, is_llama
from harness.verdict import Finding

FaultClass = Literal["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M"]
# The first thing that a fault changes where it applies; tests verify it for every fault.
#   numbers  losses or gradient norms      matmuls  conversion or the number of scaled matmuls    data  the data digest
#   operands only casts                    traffic  only collectives                              memory  saved bytes
#   graphs   what is compiled or fused     state  what the target leaves changed              resumed  what was loaded
#   experts  what experts record           crash  a rank raises                       trains   a refused case trains
#   nothing  equivalent
Shows = Literal[
    "numbers", "matmuls", "data", "operands", "traffic", "memory", "graphs", "experts", "state", "resumed", "crash",
    "trains", "nothing",
]  # fmt: skip

# What a fault needs, by its `model`: not every one can be injected at a seam of torch, torchao or the harness.
NEEDS = {
    "any": "a case that it applies to",
    "llama": "a target that trains the Llama of the cases",
    "reference": "the reference target, whose code it changes",
}

PREFIX = "fault:"  # `fault:NAME` is the injection that injects a fault


Texts = str | tuple[str, ...]
Named = Literal["module", "operand", "rank", "step", "cause"]
MISLEADING = "misleading"


class ClassDemand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of faults, as `classes.toml` describes it: what the headline of every one of them must name."""

    title: str
    names: tuple[Named, ...]
    cause: tuple[str, ...]
    misleads: tuple[str, ...] = ()


class Headline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the first finding about an injected fault must name: one of these patterns each, where there are any.

    `rank`: the one that has the fault, of runs of several ranks; "all": it names none, or every one. `cause`: words in
    place of those of its class. `unnamed`: what its class demands and its headline cannot name; `why` it cannot.
    """

    rule: Texts = ()
    module: Texts = ()
    operand: Texts = ()
    rank: int | Literal["last", "all"] | None = None
    step: int | None = None
    cause: Texts = ()
    unnamed: tuple[Named, ...] = ()
    why: str = ""

    def misnamed(self, finding: Finding, world_size: int) -> tuple[str, ...]:
        """Return the fields of the finding that are others."""
        texts = (("rule", self.rule), ("module", self.module), ("operand", self.operand))
        found = ((name, getattr(finding, name) or "", _listed(wanted)) for name, wanted in texts)
        wrong = [name for name, text, wanted in found if wanted and not any(fnmatchcase(text, one) for one in wanted)]
        ranks = set(finding.ranks or ([] if finding.rank is None else [finding.rank]))
        named = {"last": {world_size - 1}, "all": ranks if len(ranks) == world_size else set()}
        if world_size > 1 and self.rank is not None and ranks != named.get(str(self.rank), {self.rank}):
            wrong.append("rank")
        if self.step is not None and finding.step != self.step:
            wrong.append("step")
        return tuple(wrong)


def _has_one(text: str, words: Texts) -> bool:
    return any(re.search(rf"\b{re.escape(word)}", text) for word in _listed(words))  # "eps", not "steps"


def _listed(texts: Texts) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One injected fault.

    `where`: its scope, selectors one of which a case must match. `since_step`: the first step in which anything can
    differ. `model`: which targets have what it changes. `equivalent`: why the fault has no observable effect (an
    equivalent mutant); None if it must be detected. `headline`: where it is, as far as any host case can say that, and
    what else the headline must name than that of any fault of its class.
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
    headline: Headline = Headline()

    def misnamed(self, finding: Finding, world_size: int, *, by_fqn: bool = True) -> tuple[str, ...]:
        """Return what the headline lacks or has otherwise: "rule", parts of the place, "cause"; and "misleading".

        It misleads by a word, or by another module or rank than the fault's. A rank that ended names a cause, and no
        place in the model. `by_fqn`: modules have the names of the list; otherwise any module is one.
        """
        demand, place = FAULT_CLASSES[self.group], self.headline.misnamed(finding, world_size)
        wrong = [name for name in place if by_fqn or name not in ("module", "operand", "rule")]
        asked = ("cause",) if self.shows == "crash" else demand.names
        given = {name: getattr(finding, name) not in (None, "") for name in ("module", "operand", "rank", "step")}
        given["rank"] = given["rank"] or world_size == 1
        text = " ".join((finding.rule, finding.message, finding.fix or "")).lower()
        given["cause"] = (by_fqn and bool(self.headline.rule)) or _has_one(text, self.headline.cause or demand.cause)
        wrong += [name for name in asked if not given[name] and name not in (*wrong, *self.headline.unnamed)]
        elsewhere = any(given[name] for name in ("module", "rank") if name in wrong)
        return (*wrong, *([MISLEADING] if elsewhere or _has_one(text, demand.misleads) else []))

    @property
    def injection(self) -> str:
        return f"{PREFIX}{self.name}"

    def fits(self, target: str) -> bool:
        return {"any": True, "llama": is_llama(target), "reference": target == REFERENCE}[self.model]

    @property
    def unrefuses(self) -> bool:
        """Return True if a case that must be refused trains with it."""
        return self.shows == "trains"

    def hosts(self, *, at_most: int | None = None) -> tuple[Case, ...]:
        """Return the first `at_most` host cases that it applies to, each of another kind; it has at least one.

        The first is the catalogue's, the second the same in bfloat16, and so on for every kind of layout.
        """
        return _hosts_of(self)[:at_most]

    def applies(self, case: Case) -> bool:
        """Return True if the fault can be injected into this case and has its effect there.

        A case with compiled blocks, a pipeline, context parallelism or DDP takes only scopes that name this axis (of
        DDP `dp_shard`): compiled blocks do not call what other faults patch, and in others their effect was not
        measured.
        """
        layout = case.layout
        own = (
            ("compile", case.compile != "none"),
            ("pp", layout.pp > 1),
            ("cp", layout.cp > 1),
            ("dp_shard", layout.is_ddp),
        )
        to_name = {axis for axis, is_on in own if is_on}
        scopes = map(parse_selector, self.where)
        return self.fits(case.target) and any(
            scope.matches(case) and to_name <= {term.axis for term in scope.terms} for scope in scopes
        )


class HostKind(NamedTuple):
    """What decides how sharply a host case is checked: sums in another order, and how much they round."""

    layout: str  # pipeline, TP, DDP, HSDP, FSDP2, one rank
    dtype: str


def host_kind(case: Case) -> HostKind:
    layout = case.layout
    replicated = "DDP" if layout.is_ddp else "HSDP"
    degrees = {"pipeline": layout.pp, "TP": layout.tp, replicated: layout.dp_replicate, "FSDP2": layout.dp_shard}
    return HostKind(next((kind for kind, degree in degrees.items() if degree > 1), "one rank"), case.train.dtype)


@functools.cache
def _hosts_of(fault: Fault) -> tuple[Case, ...]:
    refused = fault.unrefuses
    cases = [case for case in all_hosts() if fault.applies(case) and (expected_refusal(case) is not None) == refused]
    kinds: dict[HostKind, Case] = {}
    for case in cases:
        kinds.setdefault(host_kind(case), case)

    def order(case: Case) -> tuple[bool, str, bool]:
        """Sort the layout of the first host case to the front, and within a layout bfloat16 to the end."""
        kind = host_kind(case)
        return kind.layout != host_kind(cases[0]).layout, kind.layout, kind.dtype == "bfloat16"

    return tuple(sorted(kinds.values(), key=order))


@functools.cache
def host_ids() -> tuple[str, ...]:
    """Return the cases of `hosts.toml`."""
    return tuple(tomllib.loads(_HOSTS.read_text(encoding="utf-8"))["cases"])


@functools.cache
def all_hosts() -> tuple[Case, ...]:
    """Return the host cases of the catalogue, each followed by the same case in bfloat16 where that can train."""
    hosts = (host for case in map(parse_case_id, host_ids()) for host in (case, _in_bfloat16(case)))
    return tuple(host for host in hosts if not exclusions(host))


def _in_bfloat16(case: Case) -> Case:
    return msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, dtype="bfloat16"))


def fault_named(name: str) -> Fault:
    """Return the fault of this name. Raises HarnessError with a suggestion if it does not exist."""
    known = all_faults()
    if name not in known:
        fix = suggestion(name, known, listed=LIST_FAULTS)
        raise HarnessError(f"no fault is named '{name}'.", where=f"{PREFIX}{name}", fix=fix)
    return known[name]


@functools.cache
def all_faults() -> Mapping[str, Fault]:
    """Return all injected faults by name, in the order of `faults.toml`: class A first."""
    tables = tomllib.loads(_LIST.read_text(encoding="utf-8")).items()
    return MappingProxyType({name: msgspec.convert({"name": name, **table}, Fault) for name, table in tables})


_LIST, _HOSTS, _CLASSES = (Path(__file__).with_name(f"{name}.toml") for name in ("faults", "hosts", "classes"))
FAULT_CLASSES = msgspec.convert(tomllib.loads(_CLASSES.read_text(encoding="utf-8")), dict[FaultClass, ClassDemand])
