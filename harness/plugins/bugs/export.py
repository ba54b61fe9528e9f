"""A case that fails as one Python file that needs torch and torchao only: `worker/exported.py` with its values.

A injected fault becomes a file of its own, which the script takes as a patch. Sources are parsed, not imported.
"""

import ast
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from harness.checks.graphs import ROWS
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.matrix.axes import own_axes
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.choice import FAULT_PREFIX, catalogue_of_faults
from harness.matrix.layout import device_mesh
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN
from harness.matrix.numerics import sums_in_order
from harness.plugins.bugs.bugfile import UNREPORTED
from harness.plugins.bugs.shrink import Attempt
from harness.plugins.bugs.trials import NamedCase
from harness.registry import REFERENCE
from harness.registry import injections as kinds_of_injections
from harness.result import CaseResult
from harness.running.plan import Injection
from harness.verdict import FailureSignature, Finding

TEMPLATE = Path(__file__).parent / "worker" / "exported.py"
_NUMBERS = ("scales", "parity", "module_replay", "divergence", "metamorphic", "recompute", "finite")
# Axes that a script has not got.
_NOT_IN_SCRIPTS = {
    *("pp", "schedule", "ep", "cp", "sequence_order", "reshard_after_forward", "grouped_mm", "casts", "tied"),
    *("experts", "top_k", "router", "balance", "accumulation", "reduce_grads", "max_norm", "evaluate"),
    *("ignored_tokens", "packing", "resume", "optimizer", "parameter_dtype", "reduce_dtype"),
}
# How far from one rank is allowed, and clean runs are.
_EXACT = 1e-5, 0.0  # bitwise equal, or the rounding of a mean
_FLOAT32 = 0.03, 0.007  # sums in another order move a value to the next one of float8
_BFLOAT16 = 0.3, 0.15  # under TP
_NEEDED: Mapping[str, str] = {
    "hang": "a deadline that tells a hang from a slow machine",
    "loss_vs_golden": "the BF16 reference curve",
    "graphs": "the compiled graphs",
    "traffic": "the number of collectives that this very model must send",
    "memory": "the bytes that this very model must save",
}
_TIMEOUT_S = 300.0
_TITLE, _NAME = 110, 40  # letters
MISMATCH = "CollectiveMismatch"  # ranks of the virtual fabric raise it where GPUs hang

Detects = Literal["gradients", "crash", "mismatch", "scattered"]
Outcome = Literal["FAULT", "fixed", "cannot tell"]
_CONSTANT = re.compile(r"^([A-Z0-9_]+) = .+?(?=  #|$)", flags=re.MULTILINE)
_OUTCOME = re.compile(
    r"^rank \d+: (FAULT|fixed|cannot tell)(?:.*\n)(?:  (?:expected|found) .*\n?)*", flags=re.MULTILINE
)


class Script(NamedTuple):
    text: str
    ranks: int


class Exported(NamedTuple):
    title: str
    case_id: str
    signature: FailureSignature
    finding: Finding | None  # the first; None for a refusal that torch must raise
    script: Script
    file: Path
    patches: tuple[str, ...]  # FILE.py:FUNCTION of what makes the case fail
    error: str = ""  # of a crash: what the first rank raised, and when
    links: tuple[str, ...] = ()  # where it is reported: by the user, and by the records of known issues that show


class Proof(NamedTuple):
    """The outcome of a script on the first rank that printed one, else the end of the output."""

    outcome: Outcome
    text: str


class Neighbors(msgspec.Struct, frozen=True, kw_only=True):
    """Of the JSON of `bug shrink`: the cases next to the smallest one."""

    needed: tuple[Attempt, ...]


def export(
    named: NamedCase, result: CaseResult, injections: Sequence[Injection], folder: Path, known: Mapping[str, str] = {}
) -> Exported:
    """Write the script of a case that failed, and the injected faults that make it fail. HarnessError if it did not.

    `known`: the recorded faults that show, by name.
    """
    case, signature, title = named.case, failure_of(result), title_of(named, result)
    error = _error_of(result)
    made, file = script(case, signature, title=title, checks=failed_checks(result)), folder / f"{file_name(named)}.py"
    reports = [named.bug.bug.link] if named.bug is not None and named.bug.bug.link != UNREPORTED else []
    links = (*reports, *(f"{name}: {why.replace(f' ({UNREPORTED})', '')}" for name, why in known.items()))
    patches = tuple(patch_of(injection, folder) for injection in injections)
    write_whole(file, made.text.encode())
    finding = next(iter(result.findings), None)
    return Exported(title, case_id(case), signature, finding, made, file, patches, error, links)


def failure_of(result: CaseResult) -> FailureSignature:
    """Return how it failed. HarnessError if it did not."""
    if result.failure_signature is None:
        fix = "give the case, and by --inject the fault, with which it fails."
        raise HarnessError("it does not fail, so there is nothing to export.", where=result.case_id, fix=fix)
    return result.failure_signature


def title_of(named: NamedCase, result: CaseResult) -> str:
    if named.bug is not None:
        return named.bug.bug.title
    signature = failure_of(result)
    lines = (finding.first_line for finding in result.findings if finding.judged and signature.check)
    first = (_error_of(result).partition(" (rank")[0] or next(lines, signature.what)).partition("; ")[0]
    return f"{textwrap.shorten(first, _TITLE, placeholder=' …')} ({setup_of(named.case)})"


def failed_checks(result: CaseResult) -> set[str]:
    return {finding.check for finding in result.findings if finding.judged}


def file_name(named: NamedCase) -> str:
    """Without its ending; of a long id the layout, the recipe, and a digest, which no other case has."""
    if named.bug is not None:
        return named.bug.id
    whole, recipe = case_id(named.case), named.case.float8.recipe
    digest = hashlib.sha256(whole.encode()).hexdigest()[:6]
    return whole if len(whole) <= _NAME else f"{whole.partition(recipe)[0]}{recipe}-{digest}"


def setup_of(case: Case) -> str:
    """Return the case in the words of a title: "float8 rowwise, FSDP2, TP"."""
    layout = case.layout
    kinds = {"HSDP": layout.dp_replicate > 1, "FSDP2": layout.dp_shard > 1 == layout.dp_replicate, "TP": layout.tp > 1}
    kinds["torch.compile"] = case.compile != "none"
    recipe = f"float8 {case.float8.recipe}" if case.float8.enabled else "bfloat16"
    return ", ".join([recipe, *(name for name, used in kinds.items() if used)])


def _error_of(result: CaseResult) -> str:
    """What the first rank of a crash raised and when, with its numbers; of our fabric, what a maintainer calls it."""
    failures = () if result.run is None or failure_of(result).kind != "crash" else result.run.failures
    cause = next((failure for failure in failures if not failure.consequence), None)
    if cause is None:
        return ""
    line = " ".join(cause.message.split())
    head, mismatch, calls = line.partition(f"{MISMATCH}: ranks of one process group disagree: ")
    message = f"ranks of one group call different collectives: {calls}" if mismatch else head
    return f"{message} (rank {cause.rank}, {cause.phase})"


def exported_case(case: Case) -> Case:
    """Return the case in a dtype that GPUs have and that tells best. HarnessError for what a script does not have.

    float64 exists on the virtual device only. In bfloat16, gradients under TP are up to 17 % from one rank without a
    fault: where the recipe allows it, a script compares in float32.
    """
    if case.target != REFERENCE:
        what = f"target {case.target} cannot be exported: a script has the reference Llama."
        raise HarnessError(what, fix="export the case without its target, if it fails there too.")
    if case.float8.traits.block:
        what = (
            "MXFP8 cannot be exported: a script has no casts of blocks, whose operators torchao has on SM 10.0 alone."
        )
        fix = "report the command that reproduces it: the case runs wherever this tool is installed."
        raise HarnessError(what, where=case_id(case), fix=fix)
    dropped = [name for name in own_axes(case) if name in _NOT_IN_SCRIPTS]
    if dropped:
        what = f"{' and '.join(dropped)} cannot be exported: a script converts by a recipe and trains in plain steps."
        raise HarnessError(what, fix="export the case without, if it fails alike: `bug shrink` tells.")
    dtype = case.train.dtype
    if dtype == "float64":
        dtype = "bfloat16" if case.float8.traits.writes_bfloat16 else "float32"
    elif dtype == "bfloat16" and case.layout.tp > 1 and not case.float8.traits.writes_bfloat16:
        dtype = "float32"
    return msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, dtype=dtype))


def script(case: Case, signature: FailureSignature, *, title: str, checks: Collection[str] = ()) -> Script:
    """Return the script that shows this failure of the case, in which `checks` failed. HarnessError where none can."""
    values = constants(case, signature, checks)
    ranks = case.layout.tp if values["DETECT"] == "scattered" else case.world_size
    head = _HEAD.format(title=quoted(title), ranks=ranks)
    return Script(text=head + with_values(TEMPLATE.read_text().split('"""', 2)[2], values), ranks=ranks)


def with_values(source: str, values: Mapping[str, object]) -> str:
    """Return the source with these values of its constants, whose names are written as there. Comments stay."""

    def line(match: re.Match[str]) -> str:
        if match[1] not in values:
            return match[0]
        value = values[match[1]]
        text = json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')
        return f"{match[1]} = {text}"

    return _CONSTANT.sub(line, source)


def quoted(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")


def constants(case: Case, signature: FailureSignature, checks: Collection[str] = ()) -> dict[str, object]:
    """Constants of the template for this failure, in which `checks` failed. HarnessError where no script shows it."""
    detects = what_detects(signature, checks)
    mesh = device_mesh(case.layout, fsdp=case.uses_fsdp)
    if detects == "scattered":
        mesh = {"tp": case.layout.tp}
    elif case.layout.async_tp:
        what = "async TP cannot be exported, but for wrong rows of fused_scaled_matmul_reduce_scatter."
        raise HarnessError(what, fix="export the case without async TP, if it fails alike: `bug shrink` tells.")
    return _of_failure(case, signature, detects) | {"MESH": mesh} | _of_case(case)


_HEAD = '''"""{title}

torchrun --nproc-per-node {ranks} FILE.py [PATCH.py:FUNCTION ...] exits with 0 where it is fixed. Patches come first.
"""'''


def what_detects(signature: FailureSignature, checks: Collection[str] = ()) -> Detects:
    """Return the part of the script that detects failures like this one, in which `checks` failed."""
    if signature.kind == "crash":
        return "mismatch" if MISMATCH in signature.what else "crash"
    if signature.kind == ROWS.name and signature.what == "fused_scaled_matmul_reduce_scatter":
        return "scattered"
    if signature.kind != "hang" and not {signature.check, *checks}.isdisjoint(_NUMBERS):
        return "gradients"
    needed = _NEEDED.get(signature.check or signature.kind, "what the harness records of a run")
    what = f"a failure of kind {signature.kind} cannot be exported: a script would need {needed}."
    fix = "give the id of the case in the issue, or export a case with wrong gradients."
    raise HarnessError(what, fix=fix)


def _of_failure(case: Case, signature: FailureSignature, detects: Detects) -> dict[str, object]:
    """Constants of the template: what fails, and how far from one rank is wrong."""
    in_bfloat16 = case.layout.tp > 1 and case.float8.traits.writes_bfloat16  # no limit on whole gradients is sharp then
    limit, rounding = _EXACT if sums_in_order(case) else _BFLOAT16 if in_bfloat16 else _FLOAT32
    return {
        "DETECT": detects,
        "STEPS": signature.first_step or 1,
        "ERROR": error_pattern(signature.what) if detects == "crash" else "",
        "LIMIT": limit,
        "ROUNDING": rounding,
        # hooks would change graphs; the linear of one rank has no bias
        "COMPARE_LINEARS": in_bfloat16 and case.compile == "none" and not case.model.bias,
    }


def _of_case(case: Case) -> dict[str, object]:
    """Constants of the template: layout, float8, model and data."""
    layout, float8, shape, train = case.layout, case.float8, case.model.shape, case.train
    filtered = [fqn for fqn in BLOCK_LINEARS if any(part in fqn for part in float8.filter_fqns)]
    kept = tuple(fqn.rpartition(".")[2] for fqn in filtered)
    return {
        "SEQUENCE_PARALLEL": layout.sequence_parallel,
        "LOSS_PARALLEL": layout.loss_parallel,
        "MIXED_PRECISION": train.dtype == "bfloat16",
        "CHECKPOINT": case.checkpointing.mode,
        "CHECKPOINT_EVERY": case.checkpointing.every,
        "COMPILE": {"none": "", "graph": "aot_eager", "inductor": "inductor"}[case.compile],
        "WAIT": layout.wait_for_embedding,
        "RECIPE": float8.recipe,
        "NOT_CONVERTED": kept if float8.output_layer else (*kept, OUTPUT_FQN),
        "FP8_ALL_GATHER": case.gathers_float8,
        "PRECOMPUTE": float8.precompute_scale,
        "FLOAT8_STYLES": float8.tp_styles == "float8",
        "PAD_INNER_DIM": float8.pad_inner_dim,
        "DTYPE": case.wide_dtype,
        "VOCAB": case.model.padded_vocab_size,
        "DIM": shape.dim,
        "LAYERS": shape.layers,
        "HEAD_DIM": shape.head_dim,
        "KV_DIM": shape.kv_heads * shape.head_dim,
        "FFN": shape.ffn_dim,
        "BIAS": case.model.bias,
        "BATCH": case.local_batch,
        "TOKENS": train.seq_len,
        "LR": train.lr,
    }


def error_pattern(error: str) -> str:
    """Return a regular expression for an error whose numbers, places and ranks are N, … and RANKS."""
    return re.sub(r"(?<![A-Za-z_])N(?![A-Za-z_])|…|RANKS", r".+?", re.escape(error)).replace(r"\ ", " ")


def proof_of(exported: Exported) -> Proof:
    """Does the script show its fault? Run it with its patches on this machine's Python."""
    ranks = str(exported.script.ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    try:
        done = subprocess.run(
            [*torchrun, str(exported.file), *exported.patches],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    except subprocess.TimeoutExpired:
        return Proof("cannot tell", f"it did not end within {_TIMEOUT_S:.0f} s")
    return script_outcome(done.stdout)


def script_outcome(output: str) -> Proof:
    """Return the verdict in the output of a script: a fault on any rank, else "cannot tell", else "fixed"."""
    texts: dict[str, str] = {}
    for match in _OUTCOME.finditer(output):
        texts.setdefault(match[1], match[0].rstrip())
    worst: tuple[Outcome, ...] = ("FAULT", "cannot tell", "fixed")
    return next((Proof(of, texts[of]) for of in worst if of in texts), Proof("cannot tell", output.strip()[-500:]))


_PACKAGE = Path(__file__).parents[2]
# Parts of the harness that do not run without it.
_LIMITS = (
    "harness.matrix",
    "harness.trace",
    "harness.worker.dispatch_hooks",
    "harness.worker.probes",
    "harness.worker.process",
    "harness.worker.tensors.digests",
    "harness.worker.tensors.names",
    "harness.worker.tensors.places",
    "harness.worker.targets",
    "harness.worker.virtual",
)


class _NeedsHarness(HarnessError):
    """A definition needs a part of the harness."""


def exported_fault(name: str) -> str:
    """Return the file that plants a fault by its function of the same name. HarnessError where it needs the harness."""
    imports: set[str] = set()
    texts: dict[tuple[str, str], str] = {}
    try:
        gather(_modules()[name], name, imports, texts)
    except _NeedsHarness as reached:
        fix = "write it as a function of a file, and give --inject FILE.py:FUNCTION."
        raise HarnessError(f"injected fault {name} cannot be exported: {reached.what}", fix=fix) from reached
    head = "\n".join([f'"""Plants the fault {name}, a deliberate bug: {_title(name)}."""', "", *sorted(imports)])
    return "\n\n\n".join([head, *texts.values()]) + "\n"


def _title(name: str) -> str:
    return str(catalogue_of_faults("bug export").fault_named(name).title)


def patch_of(injection: Injection, folder: Path) -> str:
    """FILE.py:FUNCTION that does the same as an injection; of a injected fault, a new file in `folder`."""
    if not injection.text.startswith(FAULT_PREFIX):
        return injection.target
    fault = injection.text.removeprefix(FAULT_PREFIX)
    write_whole(folder / f"{fault}.py", exported_fault(fault).encode())
    return f"{folder / fault}.py:{fault}"


def planted_title(injections: Sequence[Injection]) -> str:
    """Return what the first injected fault among these injections is; "" without one."""
    planted = (injection.text for injection in injections if injection.text.startswith(FAULT_PREFIX))
    return next((_title(text.removeprefix(FAULT_PREFIX)) for text in planted), "")


class _Import(NamedTuple):
    module: str
    name: str
    text: str


class Source:
    """The top level of one module: what it defines, and what it imports by the name that this binds."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, list[_Import]] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", "")
                for alias in node.names if module != "__future__" else ():
                    bound = alias.asname or (alias.name if module else alias.name.partition(".")[0])
                    one = ast.ImportFrom(module, [alias], 0) if module else ast.Import([alias])
                    self.imports.setdefault(bound, []).append(_Import(module, alias.name, ast.unparse(one)))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                self.definitions |= {name.id: node for name in names}

    def text_of(self, node: ast.stmt) -> str:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        return "\n".join(self._lines[first - 1 : node.end_lineno])


def gather(
    module: str,
    name: str,
    imports: set[str],
    texts: dict[tuple[str, str], str],
    read: Callable[[str], Source] | None = None,
) -> None:
    """Add the text of a definition, behind those of what it needs, and the imports from elsewhere."""
    source = (read or _read)(module)
    node = source.definitions.get(name)
    used_names, inside = _words(node or ast.Pass())
    inner = next((imported for imported in inside if imported.startswith("harness.")), None)
    if node is None or inner is not None or module.startswith(_LIMITS):
        raise _NeedsHarness(f"it needs {inner or module}, which is a part of the harness.")
    if (module, name) in texts:
        return
    texts[module, name] = ""  # it may need itself
    for used in used_names:
        if used in source.definitions:
            gather(module, used, imports, texts, read)
        for line in source.imports.get(used, ()):
            if line.module.startswith("harness."):
                gather(line.module, line.name, imports, texts, read)
            else:
                imports.add(line.text)
    del texts[module, name]
    texts[module, name] = source.text_of(node)  # behind what it needs


@functools.cache  # most faults share their helpers
def _words(node: ast.stmt) -> tuple[list[str], set[str]]:
    """Return the names that a definition uses, each once in their order, and the modules that it imports inside."""
    nodes = list(ast.walk(node))
    used = dict.fromkeys(name.id for name in nodes if isinstance(name, ast.Name))
    return [*used], {statement.module or "" for statement in nodes if isinstance(statement, ast.ImportFrom)}


@functools.cache
def _read(module: str) -> Source:
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    return Source((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


@functools.cache
def _modules() -> Mapping[str, str]:
    """Return the module of the function that plants each fault."""
    package, _, _ = kinds_of_injections()[FAULT_PREFIX].plant.partition(":")
    folder = _PACKAGE.joinpath(*package.split(".")[1:])
    modules = [f"{package}.{path.stem}" for path in sorted(folder.glob("*.py"), reverse=True)]
    return {name: module for module in modules for name in _read(module).definitions}  # of two with a name the first
