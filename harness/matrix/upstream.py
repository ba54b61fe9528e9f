"""What new versions of torch and torchao do otherwise than the first ones that the formulas were verified with.

A formula that depends on such a change asks for it by name. Each was found by a formula that disagreed, was understood,
and holds from `since` on; faults are records in `cases/known.toml` instead. A nightly may have a change before the
release or not, so the source of the installed package is asked first, and its version only where that does not tell.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from harness.sources import installed_version, is_since, package_paths


class UpstreamChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `since`: the first release of `package` that has it.

    `within_limits`: formulas that give limits, within which numbers move where a formula of `formulas` says something
    else. `rounds`: a selector of the cases in which ranks round otherwise, so that every number may move.
    """

    name: str
    since: str
    file: str  # of the package, which tells: it contains `now` with the change, and `before` without
    now: str
    before: str
    what: str  # one sentence
    link: str
    formulas: tuple[str, ...]  # those that depend on it
    package: str = "torch"
    within_limits: tuple[str, ...] = ()
    rounds: str = ""

    def is_in(self, software: Mapping[str, str]) -> bool:
        """Return True if these versions, by package, have the change. A nightly of 2.15 is older than 2.15."""
        return is_since(software.get(self.package, ""), self.since)

    def ask(self, folders: Iterable[Path]) -> bool | None:
        """True with the change in the package in these folders, False without; None if the file does not tell."""
        for path in (folder / self.file for folder in folders):
            if path.is_file():
                text = path.read_text(errors="replace")
                return True if self.now in text else False if self.before in text else None
        return None

    @property
    def is_installed(self) -> bool:
        """Return whether the package of this environment has it. Nothing is imported."""
        asked = self.ask(package_paths(self.package))
        return self.is_in({self.package: installed_version(self.package) or ""}) if asked is None else asked


Changes = frozenset[UpstreamChange]
NONE: Changes = frozenset()

SEPARATE_BACKWARD_CASTS = UpstreamChange(
    name="separate-backward-casts",
    since="2.14",
    file="_functorch/compile_utils.py",
    now="or n.is_impure()",
    before="""or n.op == "get_attr"
            or get_aten_target(n) in rand_ops""",
    what="A compiled block no longer merges equal results of forward and backward that wait for a collective. So "
    "under TP a tensorwise weight is cast once for forward and once for backward, the gradient of a column-parallel "
    "output once for each of its matmuls, and the scales of backward are saved.",
    link="https://github.com/pytorch/pytorch/blob/v2.14.0/torch/_functorch/compile_utils.py",
    formulas=("casts", "saved memory"),
    within_limits=("casts", "traffic"),  # an amax that is computed twice is reduced twice
)
GRADIENTS_IN_REDUCE_DTYPE = UpstreamChange(
    name="gradients-in-reduce-dtype",
    since="2.15",
    file="distributed/fsdp/_fully_shard/_fsdp_param.py",
    now="def unsharded_grad_dtype(",
    before="unsharded_grad.to(self.reduce_dtype)",
    what="FSDP2 keeps unsharded gradients in the reduce dtype, before in the compute dtype. They are rounded once "
    "less, and under TP the gradients of norms are reduced in the reduce dtype.",
    link="https://github.com/pytorch/pytorch/issues/190626",
    formulas=("traffic",),
    rounds="dtype=bfloat16 reduce_dtype=float32",
)
STAGES_VOTE_TOGETHER = UpstreamChange(
    name="stages-vote-together",
    since="2.15",
    file="distributed/pipelining/schedules.py",
    now="def _initialize_pipeline_distributed_state(",
    before="stage._warmup_forward_vote(",
    what="Pipeline ranks agree by an all-reduce whether all know the shapes to send. Then neighbors "
    "connect: the lower one sends a number, and all meet in an all-reduce. Before, a stage sent its vote onwards.",
    link="https://github.com/pytorch/pytorch/blob/v2.15.0/torch/distributed/pipelining/schedules.py",
    formulas=("traffic",),
)

CHANGES = (SEPARATE_BACKWARD_CASTS, GRADIENTS_IN_REDUCE_DTYPE, STAGES_VOTE_TOGETHER)


def changes_in(software: Mapping[str, str]) -> Changes:
    """Return the changes of these versions, by package: of a run elsewhere that does not say what it found."""
    return frozenset(change for change in CHANGES if change.is_in(software))


def installed_changes() -> Changes:
    """Return the changes of the installed packages, by their sources."""
    return frozenset(change for change in CHANGES if change.is_installed)
