"""The faults: planted mistakes of the kinds that were found in real FP8 training stacks, to measure what checks see.

Owns what each fault is called, where it applies and what it must change. How it is planted is `worker/faults/`'s; the
letters A to H and the entry numbers are those of the project's catalogue of historic faults. The list itself is
`faults.toml`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from harness.errors import HarnessError
from harness.spec.axes import suggestion
from harness.spec.case import Case
from harness.spec.caseid import parse_case_id
from harness.spec.selector import parse_selector

FaultClass = Literal["A", "B", "C", "D", "E", "F", "G", "H"]
FAULT_CLASSES: dict[FaultClass, str] = {
    "A": "scale or amax over the wrong data or group",
    "B": "stale scale or stale FP8 data",
    "C": "wrong set of modules converted",
    "D": "communication, DTensor and FSDP plumbing",
    "E": "recompute, kernels and saved memory",
    "F": "shapes, padding, hardware rules",
    "G": "gradients, data, optimizer, metrics",
    "H": "compiled blocks and async TP",
}

# What a fault changes first where it applies; the tests hold every fault to it.
#   numbers  losses or gradient norms      matmuls  conversion or the number of scaled matmuls    data  the data digest
#   operands casts alone                   traffic  collectives alone                             memory  saved bytes
#   graphs   what was compiled or fused
#   crash    a rank raises                 trains   a refused case trains                         nothing  equivalent
Shows = Literal["numbers", "matmuls", "data", "operands", "traffic", "memory", "graphs", "crash", "trains", "nothing"]

PREFIX = "fault:"  # `fault:NAME` is the injection that plants a fault


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planted mistake.

    `where`: selectors, of which a case must match one. `equivalent`: why no observable exists where the fault applies,
    None for a fault that must be found. `since_step`: the first step at which anything can differ.
    """

    name: str
    group: FaultClass
    title: str
    entry: str  # number in the catalogue of historic faults
    link: str  # the report behind the entry
    where: tuple[str, ...]
    shows: Shows = "numbers"
    since_step: int = 1
    equivalent: str | None = None

    @property
    def injection(self) -> str:
        """What a rank is sent to plant it."""
        return f"{PREFIX}{self.name}"

    def applies(self, case: Case) -> bool:
        """True when the fault can be planted in this case and must have its effect there.

        Faults of class H need compiled blocks; those of all others patch what compiled blocks do not call.
        """
        if (case.compile != "none") != (self.group == "H"):
            return False
        return any(parse_selector(text).matches(case) for text in self.where)


# The cases that carry the faults: small worlds, one per kind of machinery, all on goldens that exist.
CARRIER_IDS = (
    "single-tensorwise-v2048-f64",
    "single-rowwise-v2048-f64",
    "fsdp2-tensorwise-v2048-f64",
    "fsdp2-tensorwise-ag.fp8-v2048-f64",
    "fsdp2-tensorwise-ag.fp8pre-v2048-f64",
    "tp2-tensorwise-v2048-f64",
    "tp2-rowwise-v2048-f64",
    "tp2-tensorwise-tpstyle.fp8-v2048-f64",
    "tp2-tensorwise-head.fp8-v2256-vpad128-f64",
    "fsdp2-tp2-tensorwise-ag.fp8-v2048-f64",
    "hsdp2x2-tensorwise-ag.fp8-v2048-f64",
    "fsdp2-tensorwise-ac.full-v2048-f64",
    "single-rowwise-ac.op-v2048-f64",
    "single-rowwise-head.fp8-v2256-vpad128-f64",
    "fsdp2-rowwise_with_gw_hp-v2048-b16",
    "fsdp8-tensorwise-pad-v2048-sl40-f64",
    "atp2-bf16-graph-v2048-b16",
    "atp2-fallback-tensorwise-tpstyle.fp8-graph-v2048-f64",
    "fsdp2-atp2-rowwise-graph-v2048-gb2-b16-tol.0.02",
    "tp2-tensorwise-head.fp8-v2256-f64",
)
REFUSED_CARRIER_ID = CARRIER_IDS[-1]  # an expected refusal: only faults that make it train are planted there


def carriers_of(fault: Fault, *, at_most: int) -> tuple[Case, ...]:
    """The first carriers, at most so many, to which a fault applies; never empty for a fault of the catalogue."""
    refused = fault.shows == "trains"
    ids = (name for name in CARRIER_IDS if (name == REFUSED_CARRIER_ID) == refused)
    found = (case for case in map(parse_case_id, ids) if fault.applies(case))
    return tuple(case for _, case in zip(range(at_most), found, strict=False))


def fault_named(name: str) -> Fault:
    """The fault of this name; HarnessError with a suggestion when there is none."""
    known = all_faults()
    if name not in known:
        raise HarnessError(f"there is no fault '{name}'.", where=f"{PREFIX}{name}", fix=suggestion(name, known))
    return known[name]


@functools.cache
def all_faults() -> Mapping[str, Fault]:
    """Every planted fault by name, in the order of the list: class A first."""
    tables = tomllib.loads(_LIST.read_text(encoding="utf-8"))
    faults = {name: msgspec.convert({"name": name, **table}, Fault) for name, table in tables.items()}
    return MappingProxyType(faults)


_LIST = Path(__file__).with_name("faults.toml")
