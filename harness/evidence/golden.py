"""Goldens: stored BF16 single-rank references, one per case family and hardware class, and the git tree that has them.

Owns their file format (sealed JSON under `golden/<hardware class>/<family>.json`), the conditions for storing one,
the comparison of an old one with a new one, and which classes of hardware are meant for a device.
`checks/loss_vs_golden.py` compares runs with goldens. What asks git is empty without it.
"""

import contextlib
import io
import math
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import HarnessError
from harness.evidence.sealed import Damaged, Sealed, own_root, read_sealed, stored_or_why, write_sealed
from harness.evidence.tolerance import ToleranceMissing, ToleranceUnfounded, tolerance_for
from harness.hints import LIST_BASELINES, update_golden
from harness.matrix.caseid import case_id as id_of_case
from harness.matrix.caseid import family_case, parse_case_id
from harness.text import timestamp
from harness.trace import RankTrace, Run

_DIRTY = "-dirty"


def tree_commit(root: Path) -> str:
    """Return the git commit of the tree at `root`, with "-dirty" when tracked files differ; "unknown" without git."""
    return git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or "unknown"


def source_commit(root: Path) -> str:
    """As `tree_commit`, but "-dirty" only if `changed_files` has any: the provenance of references."""
    commit = tree_commit(root).removesuffix(_DIRTY)
    return f"{commit}{_DIRTY}" if changed_files(root) else commit


def changed_files(root: Path) -> tuple[str, ...]:
    """Return the tracked files outside of golden/ that differ from the commit, relative to the git repository."""
    everything_else = ("--", ":(top)", ":(exclude)golden")
    return tuple(filter(None, git(root, "diff", "--name-only", "-z", "HEAD", *everything_else).split("\0")))


def tree_difference(root: Path) -> str:
    """Return the differences of tracked files from the commit, as a patch; empty without git or without any."""
    return git(root, "diff", "HEAD")


@contextlib.contextmanager
def goldens_of(root: Path, against: str) -> Iterator[Path]:
    """A folder with the golden/ of another project root, or of a git revision of this one.

    Raises HarnessError if it is neither.
    """
    if against and (Path(against) / "golden").is_dir():
        yield Path(against)
        return
    if against.startswith("-") or not git(root, "rev-parse", "--verify", "--quiet", f"{against}^{{commit}}"):
        fix = "name a commit, a branch or a tag of this project, or a folder with golden/."
        raise HarnessError("neither a revision nor a project.", where=f"--against {against}", fix=fix)
    with tempfile.TemporaryDirectory(prefix="fp8-harness-") as folder:
        archive = _git_bytes(root, "archive", "--format=tar", against, "golden")
        if archive:  # that revision may have had no goldens
            _unpack(archive, Path(folder))
        yield Path(folder)


def _unpack(archive: bytes, folder: Path) -> None:
    """Write the regular files of a tar archive below a folder. The safe filter of `extractall` needs Python 3.11.4."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in filter(tarfile.TarInfo.isfile, files):
            content = files.extractfile(member)
            path = folder / member.name
            if content is not None and path.resolve().is_relative_to(folder.resolve()):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def git(root: Path, *words: str) -> str:
    """Return git's output; empty when it fails or is not installed."""
    return _git_bytes(root, *words).decode(errors="replace")


def _git_bytes(root: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


EVIDENCE_OF_A_DEVICE = "evidence-"  # begins the names of the other files beside goldens (of the plug-in gpu)

_VENDORS = {"sm": "nvidia", "gfx": "amd"}  # by what the name of an architecture begins with


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a golden or a profile comes from. `software` is what the rank reported: torch, torchao, numpy, python, …

    Goldens of earlier versions say nothing of the CPU; what is not said is not written, so their digests stay.
    """

    software: dict[str, str]
    device: str  # "cpu" or the device name
    commit: str  # of the project with the golden; ends in "-dirty" when tracked files differed from it
    command: str
    reason: str
    created: str  # UTC, ISO 8601, seconds
    cpu: str = ""  # model and vector extensions
    limits: str = ""  # environment variables that limit its arithmetic


class Golden(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reference run: loss in nats and global gradient norm of every step, in full precision."""

    family: str
    hardware: str
    case_id: str  # the reference case that was run
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    data_digest: str
    provenance: Provenance


class GoldenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an old and a new golden; None if one of them lacks the step."""

    step: int
    old_loss: float | None
    new_loss: float | None
    old_grad_norm: float | None
    new_grad_norm: float | None

    @property
    def loss_change(self) -> float | None:
        """Return the new loss minus the old one, in nats."""
        return None if self.old_loss is None or self.new_loss is None else self.new_loss - self.old_loss


class GoldenKey(msgspec.Struct, frozen=True, kw_only=True, order=True):
    hardware: str
    family: str


def update_command(family: str, hardware: str, root: Path | None = None) -> str:
    """Return the command that makes a family's golden for this hardware, by its reference case, in this project."""
    case = family_case(family)
    assert case is not None, f"'{family}' is no family"
    device = "cpu" if hardware == "cpu" else "cuda"
    return update_golden(id_of_case(case), device=device, root=root or Path.cwd())


def make_golden(run: Run, *, family: str, case_id: str, command: str, reason: str, commit: str) -> Golden:
    """The golden of a run of the reference case. Raises `HarnessError` when the run cannot serve as a reference."""
    if not run.complete or len(run.traces) != 1:
        raise HarnessError(
            "a golden needs a run of one rank that finished.", where=case_id, fix="see why the run failed."
        )
    trace = run.traces[0]
    if trace.converted_fqns or any(step.scaled_mm_calls for step in trace.steps):
        raise HarnessError("a golden must be BF16, but FP8 matmuls ran.", where=case_id, fix="run the reference case.")
    return Golden(
        family=family,
        hardware=hardware_class(trace.device),
        case_id=case_id,
        losses=tuple(step.loss for step in trace.steps),
        grad_norms=tuple(step.grad_norm for step in trace.steps),
        data_digest=trace.data_digest,
        provenance=provenance_of(trace, command=command, reason=reason, commit=commit),
    )


def provenance_of(trace: RankTrace, *, command: str, reason: str, commit: str) -> Provenance:
    """Return where something comes from that is made now of what this rank recorded."""
    return Provenance(
        software=dict(sorted(trace.software.items())),
        device=trace.device,
        commit=commit,
        command=command,
        reason=reason,
        created=timestamp(),
    )


def missing_reason(provenance: Provenance) -> str | None:
    """Return what is wrong with a provenance that does not say why it was made; None when it does."""
    said = any(letter.isalnum() for letter in provenance.reason)
    return None if said else 'no reason is given; add --reason "why it changes"'


def golden_path(root: Path, hardware: str, family: str) -> Path:
    for name in (hardware, family):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
            raise HarnessError(f"{name!r} cannot name a golden: it is not a plain file name.")
    return root / "golden" / hardware / f"{family}.json"


def load_golden(root: Path, hardware: str, family: str) -> Golden:
    """Return the stored golden. Raises `Missing` or `Damaged` with the file and the fix."""
    path = golden_path(root, hardware, family)
    known = family_case(family) is not None
    remake = (
        f"run `{update_command(family, hardware, root)}`."
        if known
        else f"remove it; `{LIST_BASELINES}` shows the others."
    )
    golden = read_sealed(path, Golden, remake=remake, missing="no golden is stored for this family.")
    if (golden.hardware, golden.family) != (hardware, family):
        what = f"holds the golden of {golden.family} on {golden.hardware}: it was copied or renamed by hand."
        raise Damaged(what, where=str(path), fix=f"restore it or {remake}")
    return golden


def find_golden(root: Path, classes: Sequence[str], family: str) -> Golden:
    """Return the golden for the first of these hardware classes that has one: the project's, else the package's.

    Raises as `load_golden`.
    """
    places = ((place, name) for place in (root, own_root()) for name in classes)
    stored = ((place, name) for place, name in places if golden_path(place, name, family).exists())
    return load_golden(*next(stored, (root, classes[0])), family)


def write_golden(root: Path, golden: Golden) -> Path:
    """Store a golden and return its path. Raises `HarnessError` for one without a reason or with unusable numbers."""
    path = golden_path(root, golden.hardware, golden.family)
    problem = unsound(golden)
    if problem:
        raise HarnessError(f"this golden is refused: {problem}.", where=golden.family)
    return write_sealed(path, golden)


def list_goldens(root: Path) -> tuple[GoldenKey, ...]:
    """Return the goldens that are stored under the project root, sorted, without evidence and profiles."""
    files = (path for path in (root / "golden").glob("*/*.json") if path.parent.name not in ("evidence", "profiles"))
    golden_files = (path for path in files if not path.name.startswith(EVIDENCE_OF_A_DEVICE))
    return tuple(sorted(GoldenKey(hardware=path.parent.name, family=path.stem) for path in golden_files))


def stored_families(root: Path, classes: Collection[str]) -> set[str]:
    """Return the families with a golden for one of these hardware classes, in the project or in the package."""
    keys = (key for place in (root, own_root()) for key in list_goldens(place))
    return {key.family for key in keys if key.hardware in classes}


def compare_goldens(old: Golden | None, new: Golden) -> tuple[GoldenRow, ...]:
    losses = zip_longest(old.losses if old else (), new.losses)
    norms = zip_longest(old.grad_norms if old else (), new.grad_norms)
    return tuple(
        GoldenRow(step=step, old_loss=loss, new_loss=new_loss, old_grad_norm=norm, new_grad_norm=new_norm)
        for step, ((loss, new_loss), (norm, new_norm)) in enumerate(zip(losses, norms, strict=True), 1)
    )


def unsound(golden: Golden) -> str | None:
    """Return why a golden must not be stored, or None."""
    losses, source = golden.losses, golden.provenance
    numbers = f"{len(losses)} losses and {len(golden.grad_norms)} gradient norms"
    unexplained = missing_reason(source)
    problems = (
        (unexplained is not None, unexplained),
        (not (source.commit and source.created), "its provenance does not say from which commit and when it was made"),
        ((golden.hardware == "cpu") != (source.device == "cpu"), f"it was made on {source.device}"),
        (not losses or len(losses) != len(golden.grad_norms), f"it has {numbers}"),
        (not all(map(math.isfinite, (*losses, *golden.grad_norms))), "it holds a number that is not finite"),
        (len(losses) > 1 and len(set(losses)) == 1, "its loss never changes, so the reference did not learn"),
        (not golden.data_digest, "it has no data digest"),
    )
    return next((text for wrong, text in problems if wrong), None)


def curve_text(case_id: str, losses: Sequence[float], grad_norms: Sequence[float]) -> str:
    """Return the loss and gradient norm of every step, with every digit, in the format of torchtitan's golden files.

    # config: fsdp2-tp2-rowwise-v2048-b16
    # ngpu: 4
    # parallelism: FSDP=2, TP=2
    # step loss grad_norm
    1 8.023969650268555 1.5995219945907593
    """
    layout = parse_case_id(case_id).layout
    degrees = {"DDP": layout.dp_replicate, "FSDP": layout.dp_shard, "TP": layout.tp}
    mesh = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
    head = (f"# config: {case_id}", f"# ngpu: {layout.world_size}", f"# parallelism: {mesh or 'none'}")
    steps = enumerate(zip_longest(losses, grad_norms), 1)
    rows = (f"{step} {loss!r}{'' if norm is None else f' {norm!r}'}" for step, (loss, norm) in steps)
    return "\n".join((*head, "# step loss grad_norm", *rows, ""))


def hardware_class(device_name: str) -> str:
    """Return the folder name of a device: "cpu", or a slug of its name such as "nvidia-h200"."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    if not slug:
        raise HarnessError(f"device name {device_name!r} gives no hardware class.")
    return slug


def hardware_classes(device_name: str, architecture: str = "") -> tuple[str, ...]:
    """Return all classes of a device, the most specific first: "nvidia-h200", "sm90", "nvidia".

    `architecture` is "sm90", "gfx942" or empty if it is not known. Of two vendors no class is the same.
    """
    own = hardware_class(device_name)
    if own == "cpu":
        return (own,)
    match = re.match(r"(sm|gfx)[0-9a-f]+", architecture)
    vendor = _VENDORS[match[1]] if match else next((name for name in _VENDORS.values() if own.startswith(name)), "")
    return tuple(dict.fromkeys(filter(None, (own, match[0] if match else "", vendor))))


class GoldenChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new golden and the one that it replaces. `old_error` says why an existing file could not be read."""

    new: Golden
    old: Golden | None
    old_error: str = ""

    @property
    def kind(self) -> Literal["new", "changed", "unchanged"]:
        """Return whether a number or the data changed; who made the golden and why does not count."""
        if self.old is None:
            return "new"
        old, new = ((golden.losses, golden.grad_norms, golden.data_digest) for golden in (self.old, self.new))
        return "unchanged" if old == new else "changed"

    @property
    def other_data(self) -> bool:
        """Return True if the two were not trained on the same data and initial weights."""
        return self.old is not None and self.old.data_digest != self.new.data_digest


class LargestChange(msgspec.Struct, frozen=True, kw_only=True):
    """The step of a golden whose loss changed most for what is allowed there, in nats."""

    step: int
    change: float
    allowed: float

    @property
    def explains(self) -> bool:
        return self.change <= self.allowed


def largest_change(change: GoldenChange, root: Path) -> LargestChange | None:
    """How the change compares with the tolerance of the reference; None if nothing was measured or is comparable."""
    if change.old is None or change.old.data_digest != change.new.data_digest:
        return None
    try:
        allowed = tolerance_for(parse_case_id(change.new.case_id), root).per_step
    except (Damaged, ToleranceMissing, ToleranceUnfounded):
        return None
    rows = [row for row in compare_goldens(change.old, change.new) if row.loss_change is not None]
    candidates = [
        LargestChange(step=row.step, change=abs(row.loss_change or 0.0), allowed=limit)
        for row, limit in zip(rows, allowed, strict=False)
    ]
    return max(candidates, key=lambda candidate: candidate.change / candidate.allowed, default=None)


def replaced(root: Path, new: Golden) -> GoldenChange:
    old, why = stored_or_why(lambda: load_golden(root, new.hardware, new.family))
    return GoldenChange(new=new, old=old, old_error=why)


def changes_between(old_root: Path, new_root: Path) -> tuple[tuple[GoldenChange, ...], tuple[GoldenKey, ...]]:
    """Return how the goldens of one root differ in another: every golden that is there now, and those gone.

    Raises `Damaged` for one that is there now.
    """
    stored = list_goldens(new_root)
    gone = tuple(key for key in list_goldens(old_root) if key not in stored)
    return tuple(replaced(old_root, load_golden(new_root, key.hardware, key.family)) for key in stored), gone
