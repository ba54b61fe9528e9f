"""What new versions of torch and torchao do otherwise than the first ones that the formulas were verified with.

A formula that depends on such a change asks for it by name. Each was found by a formula that disagreed, was understood,
and holds from `since` on; faults are records in `cases/known.toml` instead.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


class UpstreamChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `since`: the first release of `package` that has it.

    `within_limits`: formulas that give limits, within which numbers move where a formula of `formulas` says something
    else. `rounds`: a selector of the cases in which ranks round otherwise, so that every number may move.
    """

    name: str
    since: str
    what: str  # one sentence
    link: str
    formulas: tuple[str, ...]  # those that depend on it
    package: str = "torch"
    within_limits: tuple[str, ...] = ()
    rounds: str = ""

    def is_in(self, software: Mapping[str, str]) -> bool:
        """True for these versions, by package. A source build "2.15.0a0+git12" counts as 2.15.0."""
        version = software.get(self.package)
        return version is not None and Version(Version(version).base_version) >= Version(self.since)


Changes = frozenset[UpstreamChange]
NONE: Changes = frozenset()

SEPARATE_BACKWARD_CASTS = UpstreamChange(
    name="separate-backward-casts",
    since="2.14",
    what="In a compiled block, equal results of forward and backward are not merged any more where they wait for a "
    "collective, so under TP a weight with one scale is cast once for forward and once for backward, the gradient of a "
    "column-parallel output once for each of its matmuls, and the scales of backward are saved.",
    link="https://github.com/pytorch/pytorch/blob/v2.14.0/torch/_functorch/compile_utils.py",
    formulas=("casts", "saved memory"),
    within_limits=("casts", "traffic"),  # an amax that is computed twice is reduced twice
)
GRADIENTS_IN_REDUCE_DTYPE = UpstreamChange(
    name="gradients-in-reduce-dtype",
    since="2.15",
    what="FSDP2 keeps unsharded gradients in the reduce dtype; before, in the dtype of the computation. They are "
    "rounded once less, and those of norms under TP are reduced over TP in it.",
    link="https://github.com/pytorch/pytorch/issues/190626",
    formulas=("traffic",),
    rounds="dtype=bfloat16 reduce_dtype=float32",
)
STAGES_VOTE_TOGETHER = UpstreamChange(
    name="stages-vote-together",
    since="2.15",
    what="The ranks of a pipeline agree in an all-reduce whether all know the shapes that are sent. Then neighbours "
    "connect: the lower one sends a number, and all meet in an all-reduce. Before, a stage sent its vote onwards.",
    link="https://github.com/pytorch/pytorch/blob/v2.15.0/torch/distributed/pipelining/schedules.py",
    formulas=("traffic",),
)

CHANGES = (SEPARATE_BACKWARD_CASTS, GRADIENTS_IN_REDUCE_DTYPE, STAGES_VOTE_TOGETHER)


def changes_in(software: Mapping[str, str]) -> Changes:
    return frozenset(change for change in CHANGES if change.is_in(software))


# Which versions something was verified with, as specifiers


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Version specifiers as for pip, such as ">=2.13,<2.14". Empty: it does not depend on that package."""

    torch: str = ""
    torchao: str = ""

    def gap(self, software: Mapping[str, str]) -> str | None:
        """The packages whose version is outside of the limits, as text; None when there is none.

        `software` maps package names to versions. A package that it lacks is not judged.
        """
        gaps = [
            f"{name} {software[name]} is installed, verified with {name}{limits}"
            for name, limits in (("torch", self.torch), ("torchao", self.torchao))
            if limits and name in software and not is_within(software[name], limits)
        ]
        return "; ".join(gaps) or None


def exactly(software: Mapping[str, str]) -> Verified:
    """A `Verified` for exactly these versions of torch and torchao, without pre-release and build tags."""
    versions = {name: Version(software[name]).base_version for name in ("torch", "torchao") if name in software}
    return Verified(**{name: f"=={version}" for name, version in versions.items()})


def is_within(version: str, limits: str) -> bool:
    """True when a version is within the limits. A source build "2.13.0a0+git12" counts as 2.13.0."""
    try:
        return SpecifierSet(limits).contains(Version(version).base_version)
    except InvalidVersion:
        return False
