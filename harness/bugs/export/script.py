"""The script of a case: which parts it has, and how it detects the failure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from harness.bugs.export.bundle import bundle, code
from harness.checks.graphs import ROWS
from harness.errors import HarnessError
from harness.matrix.axes import DECLARED, own_axes
from harness.matrix.case import Case
from harness.matrix.layout import REST, device_mesh
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN
from harness.matrix.numerics import sums_in_order
from harness.matrix.targets import REFERENCE
from harness.verdict import FailureSignature

_PARTS = "harness.worker.exported"
# The file of worker/exported/ whose `main` tells failures of a kind: of a crash, or found by a check.
_NUMBERS = ("scales", "parity", "local_parity", "divergence", "metamorphic", "recompute", "finite")
_EXACT = 1e-5  # clean runs are bitwise equal to one rank, or differ by the rounding of a mean
_FLOAT32 = 0.03  # clean runs: 0.007, where sums in another order move a value to the next one of float8
_BFLOAT16 = 0.3  # clean runs under TP: 0.15
_LINEAR = 0.012  # one linear by its own operands, in such runs: 0.0029 with 2 TP ranks, 0.0044 with 8
_NEEDED: Mapping[str, str] = {
    "hang": "a deadline that tells a hang from a slow machine",
    "loss_vs_golden": "the BF16 reference curve",
    "graphs": "the compiled graphs",
    "traffic": "the number of collectives that this very model must send",
    "memory": "the bytes that this very model must save",
}


class Script(NamedTuple):
    """A script: its text, its number of ranks, and the part that detects the failure."""

    text: str
    ranks: int
    tells: str


def exported_case(case: Case) -> Case:
    """The case in a dtype that GPUs have and that tells best. HarnessError for what a script does not have.

    float64 exists on the virtual device only. In bfloat16, gradients under TP are up to 17 % from one rank without a
    fault: where the recipe allows it, a script compares in float32.
    """
    if case.target != REFERENCE:
        raise HarnessError(
            f"target {case.target} cannot be exported: a script has the reference Llama.",
            fix="export the case without its target, if it fails there too.",
        )
    dropped = [name for name in own_axes(case) if not DECLARED[name].exported]
    if dropped:
        raise HarnessError(
            f"{' and '.join(dropped)} cannot be exported: a script converts by a recipe and trains in plain steps.",
            fix="export the case without, if it fails alike: `bug shrink` tells.",
        )
    dtype = case.train.dtype
    if dtype == "float64":
        dtype = "bfloat16" if case.float8.traits.writes_bfloat16 else "float32"
    elif dtype == "bfloat16" and case.layout.tp > 1 and not case.float8.traits.writes_bfloat16:
        dtype = "float32"
    return msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, dtype=dtype))


def script(case: Case, signature: FailureSignature, *, title: str, checks: Collection[str] = ()) -> Script:
    """The script that shows this failure of the case, by what any of `checks`, which failed, can be told by.

    HarnessError for a failure that no script can tell.
    """
    tells = script_part(signature, checks)
    if case.layout.async_tp and tells != "scattered":
        raise HarnessError(
            "async TP cannot be exported, but for wrong rows of fused_scaled_matmul_reduce_scatter.",
            fix="export the case without async TP, if it fails alike: `bug shrink` tells.",
        )
    given = _flags(case, signature) | _constants(case, signature) | {"ERROR": error_pattern(signature.what)}
    given["ALWAYS_PARALLEL"] = tells in ("crash", "mismatch")
    ranks = case.layout.tp if tells == "scattered" else case.world_size
    head = _HEAD.format(title=title.replace("\\", "/").replace('"', "'"), ranks=ranks)
    return Script(text=head + bundle(f"{_PARTS}.{tells}", "main", given) + _TAIL, ranks=ranks, tells=tells)


_HEAD = '''"""{title}

torchrun --nproc-per-node {ranks} FILE.py [PATCH.py:FUNCTION ...] exits with 0 where it is fixed. Patches come first.
"""

'''
_TAIL = """

if __name__ == "__main__":
    sys.exit(main())
"""


def script_part(signature: FailureSignature, checks: Collection[str] = ()) -> str:
    """The name of the file in worker/exported/ whose `main` detects failures like this one."""
    if signature.kind == "crash":
        return "mismatch" if "CollectiveMismatch" in signature.what else "crash"
    if signature.kind == ROWS.name and signature.what == "fused_scaled_matmul_reduce_scatter":
        return "scattered"
    if signature.kind != "hang" and not {signature.check, *checks}.isdisjoint(_NUMBERS):
        return "gradients"
    needed = _NEEDED.get(signature.check or signature.kind, "what the harness records of a run")
    raise HarnessError(
        f"a failure of kind {signature.kind} cannot be exported: a script would need {needed}.",
        fix="give the id of the case in the issue, or export a case whose gradients differ from those of one rank.",
    )


def _flags(case: Case, signature: FailureSignature) -> dict[str, object]:
    layout, float8, mode = case.layout, case.float8, case.checkpointing.mode
    return {
        "BIAS": case.model.bias,
        "CHECKPOINT_ALL": mode == "full",
        "CHECKPOINT_OPS": mode == "selective_op",
        "CHECKPOINT_SOME": mode == "selective_layer",
        "COMPILE": case.compile != "none",
        "DP": layout.dp > 1,
        "FILTERED": bool(_not_converted(case)),
        "FLOAT8_STYLES": float8.tp_styles == "float8",
        "FP8_ALL_GATHER": case.gathers_float8,
        "FSDP": case.uses_fsdp,
        "HSDP": layout.dp_replicate > 1,
        "LINEARS": _sums_in_bfloat16(case) and case.compile == "none" and not case.model.bias,
        "LOSS_PARALLEL": layout.tp > 1 and layout.loss_parallel,
        "MIXED_PRECISION": case.train.dtype == "bfloat16",
        "PAD_INNER_DIM": float8.pad_inner_dim,
        "PRECOMPUTE": float8.precompute_scale,
        "SEQUENCE_PARALLEL": layout.sequence_parallel,
        "STEPS_BEFORE": _steps(signature) > 1,
        "TP": layout.tp > 1,
    }


def _constants(case: Case, signature: FailureSignature) -> dict[str, object]:
    shape, train, mesh = case.model.shape, case.train, device_mesh(case.layout, fsdp=case.uses_fsdp) or {REST: 1}
    return {
        "VOCAB": case.model.padded_vocab_size,
        "DIM": shape.dim,
        "LAYERS": shape.layers,
        "HEAD_DIM": shape.head_dim,
        "KV_DIM": shape.kv_heads * shape.head_dim,
        "FFN": shape.ffn_dim,
        "FEATURES": shape.ffn_dim // case.layout.tp,
        "DEGREE": case.layout.tp,
        "STEPS": _steps(signature),
        "REPLICAS": case.layout.dp,
        "BATCH": case.local_batch,
        "TOKENS": train.seq_len,
        "EVERY": case.checkpointing.every,
        "LR": train.lr,
        "DTYPE": code(f"torch.{case.wide_dtype}"),
        "RECIPE": case.float8.recipe,
        "NOT_CONVERTED": _not_converted(case),
        "AXES": tuple(mesh),
        "DEGREES": tuple(mesh.values()),
        "LIMIT": _limit(case),
        "LINEAR_LIMIT": _LINEAR,
    }


def _steps(signature: FailureSignature) -> int:
    return signature.first_step or 1


def _limit(case: Case) -> float:
    """How far gradients may be from those of one rank."""
    if sums_in_order(case):
        return _EXACT
    return _BFLOAT16 if _sums_in_bfloat16(case) else _FLOAT32


def _sums_in_bfloat16(case: Case) -> bool:
    """True where TP ranks add what matmuls wrote in bfloat16: no limit on whole gradients is sharp then."""
    return case.layout.tp > 1 and case.float8.traits.writes_bfloat16


def _not_converted(case: Case) -> tuple[str, ...]:
    """Names of the linears of a block, without that of their module, and the output layer."""
    found = [fqn for fqn in BLOCK_LINEARS if any(part in fqn for part in case.float8.filter_fqns)]
    names = tuple(fqn.rpartition(".")[2] for fqn in found)
    return names if case.float8.output_layer else (*names, OUTPUT_FQN)


def error_pattern(what: str) -> str:
    """A regular expression for an error whose numbers, places and ranks are N, … and RANKS."""
    return re.sub(r"(?<![A-Za-z_])N(?![A-Za-z_])|…|RANKS", r".+?", re.escape(what)).replace(r"\ ", " ")
