"""Which combinations are excluded, which torch must refuse, and what cases need of a GPU: by name, reason and source.

A rule declares the axes that it reads, so that the matrix can evaluate it on part of a case; it must not read others.

`rules.toml` lists the exclusions. The conditions of most of them are selectors; the others are here, or of dimensions.
An excluded case is impossible or meaningless. A case with an expected refusal is run, and fails if it trains.
What cases need of a GPU are the rows of `gpu_needs.toml`.
"""

import functools
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import axis_type, case_from_axes, choices, shown_value
from harness.matrix.case import FEWEST_POSITIONS, Case, ModelShape
from harness.matrix.caseid import other_layout
from harness.matrix.dims import DIMENSIONS
from harness.matrix.dims.dimension import MODEL_AXES, VOCABULARY_AXES
from harness.matrix.layout import DP_AXES, MESH_AXES
from harness.matrix.linears import OUTPUT_FQN, Gemm, converted_fqns, gemms, is_misaligned, linear_fqns
from harness.matrix.recipes import OPERANDS, ROW
from harness.matrix.selector import axes_read, parse_selector
from harness.registry import is_llama, load, plugins

_TORCHAO = "https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8"
_META = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_meta_registrations.py"
_SHOWN = 8  # values of an axis in a message
_CONVERSION_AXES = ("recipe", "filter_fqns", "casts")


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A named property of cases. `axes` are the axes that it reads (`axes.py`); `when` says if a case has it."""

    name: str
    reason: str
    source: str
    axes: tuple[str, ...]
    when: Callable[[Case], int]
    targets: tuple[str, ...] = ()  # the rule is about these alone; empty: about any
    reads_shapes: bool = True  # of the model: of an own target they are not known

    def applies(self, case: Case) -> bool:
        """True if the case has the property. A rule that reads shapes of the model says nothing of unknown ones."""
        known = is_llama(case.target) or "target" not in self.axes or not self.reads_shapes
        return (not self.targets or case.target in self.targets) and known and bool(self.when(case))


class Exclusion(Rule, frozen=True):
    """A combination that is never run: impossible or meaningless."""


class Refusal(Rule, frozen=True):
    """A combination that torch must refuse. `check` checks it; the error message must match `pattern` (re.search)."""

    check: str
    pattern: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules say about a case. `refused_gemms` cause the refusal, in order of execution."""

    exclusions: tuple[Exclusion, ...]
    refusal: Refusal | None
    refused_gemms: tuple[Gemm, ...]


@functools.lru_cache(maxsize=4096)
def exclusions(case: Case) -> tuple[Exclusion, ...]:
    """Return the rules that exclude this case, in the order of `EXCLUSIONS`."""
    return tuple(rule for rule in EXCLUSIONS if rule.applies(case))


def changes(names: Iterable[str], values: Mapping[str, object]) -> str:
    """Return the axes to change in an excluded case, each with values that no rule excludes beside the others."""
    told = []
    for name in names:
        kind, allowed = axis_type(name), []
        for value in choices(name) or (range(1, 17) if kind is int else ()):
            try:
                excluded = exclusions(case_from_axes({**values, name: value}))
            except HarnessError:  # of no case
                continue
            allowed += [] if excluded else [shown_value(value)]
        told.append(f"{name} (to {', '.join(allowed[:_SHOWN])})" if allowed else name)
    return " or ".join(told)


@functools.lru_cache(maxsize=4096)
def expected_refusal(case: Case) -> Refusal | None:
    """Return the refusal that this case must end in, the first in order of execution; None when it must train."""
    return next((rule for rule in REFUSALS if rule.applies(case)), None)


def explain(case: Case) -> Explanation:
    refusal = expected_refusal(case)
    return Explanation(
        exclusions=exclusions(case),
        refusal=refusal,
        refused_gemms=tuple(gemm for gemm in gemms(case) if is_misaligned(case, gemm)) if refusal else (),
    )


def _misaligned_weights(case: Case, *, output: bool) -> bool:
    return any(
        is_misaligned(case, gemm) for gemm in gemms(case) if gemm.role != "wgrad" and (gemm.fqn == OUTPUT_FQN) == output
    )


def _misaligned_tokens(case: Case) -> bool:
    unaligned = case.tokens_per_rank % case.float8.traits.multiple != 0 and not case.float8.pad_inner_dim
    return unaligned and case.float8.traits.multiplies("wgrad")


def _filter_misses(case: Case) -> bool:
    fqns = linear_fqns(case)
    return any(not any(entry in fqn for fqn in fqns) for entry in case.float8.filter_fqns)


def _filters_a_block_linear(case: Case) -> bool:
    return any(entry in fqn for entry in case.float8.filter_fqns for fqn in linear_fqns(case) if fqn != OUTPUT_FQN)


def _casts_disagree(case: Case) -> bool:
    matmuls = OPERANDS.values() if case.float8.casts else ()
    return any(len({case.float8.traits.casts[operand] is None for operand in operands}) == 2 for operands in matmuls)


def _recomputes_unseen(case: Case) -> bool:
    traits = case.float8.traits
    return bool(case.float8.casts) and case.checkpointing.mode != "none" and not traits.multiplies("forward")


# The conditions that are no selectors, by the name of the rule: the axes that they read, and when it applies.
_CODED: Mapping[str, tuple[tuple[str, ...], Callable[[Case], int]]] = {
    **{name: rule for one in DIMENSIONS for name, rule in one.excluded.items()},
    "vocab_padding_pads": (
        VOCABULARY_AXES,
        lambda case: case.model.pad_vocab_to_multiple_of > 1 and case.model.padded_vocab_size == case.model.vocab_size,
    ),
    "packing_needs_positions": (
        ("packing", "seq_len"),
        lambda case: case.train.packing != "none" and case.train.seq_len < FEWEST_POSITIONS,
    ),
    "all_gather_needs_tensorwise": (
        ("fp8_all_gather", "recipe"),
        lambda case: case.float8.fp8_all_gather and not case.float8.traits.gathers_weights_in_float8,
    ),
    "casts_of_a_matmul_agree": (("casts", "recipe"), _casts_disagree),
    "casts_leave_float8": (
        ("casts", "recipe"),
        lambda case: bool(case.float8.casts) and not any(case.float8.traits.casts.values()),
    ),
    "rows_have_power_of_two_scales": (
        ("casts", "recipe"),
        lambda case: any(
            cast and cast.block == ROW and cast.rounding == "none" for cast in case.float8.traits.casts.values()
        ),
    ),
    "dgrad_before_wgrad": (
        ("casts", "recipe"),
        lambda case: case.float8.traits.multiplies("wgrad") and not case.float8.traits.multiplies("dgrad"),
    ),
    "checkpointed_forward_in_float8": (("casts", "recipe", "checkpointing"), _recomputes_unseen),
    "resharding_needs_another_layout": (
        ("resume", *MESH_AXES),
        lambda case: case.train.resume == "resharded" and other_layout(case.layout) is None,
    ),
    "tp_styles_need_tensorwise": (
        ("tp_styles", "recipe"),
        lambda case: case.float8.tp_styles == "float8" and not case.float8.traits.has_tp_styles,
    ),
    "tp_styles_need_converted_blocks": (
        ("tp_styles", "recipe", "filter_fqns", *MODEL_AXES),
        lambda case: case.float8.tp_styles == "float8" and _filters_a_block_linear(case),
    ),
    "top_k_among_experts": (
        ("experts", "top_k"),
        lambda case: case.model.experts > 0 and case.model.top_k > case.model.experts,
    ),
    "experts_behind_the_first_block": (MODEL_AXES, lambda case: case.model.experts > 0 and case.model.shape.layers < 2),
    "filter_matches": (("filter_fqns", "recipe", *MODEL_AXES), _filter_misses),
    "filter_contradicts_output": (
        ("target", "filter_fqns", "recipe", "output_layer"),
        lambda case: case.float8.output_layer and any(entry in OUTPUT_FQN for entry in case.float8.filter_fqns),
    ),
    "something_converted": (
        ("recipe", "filter_fqns", "output_layer", *MODEL_AXES),
        lambda case: case.float8.enabled and not converted_fqns(case),
    ),
    "every_reaches_a_layer": (
        ("checkpointing", "checkpoint_every", *MODEL_AXES),
        lambda case: (
            case.checkpointing.mode == "selective_layer" and case.checkpointing.every > case.model.shape.layers
        ),
    ),
}


def _exclusions() -> Iterator[Exclusion]:
    """Yield every exclusion, those of plug-ins last: a plug-in has rules of its own targets."""
    own = Path(__file__).with_suffix(".toml")
    files = ((plugin.folder / own.name, tuple(plugin.targets)) for plugin in plugins() if plugin.folder is not None)
    for path, targets in ((own, ()), *(file for file in files if file[0].is_file())):
        for name, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
            axes, when = _condition(name, row)
            reads_shapes = "where" not in row or not {"model", *ModelShape.__struct_fields__}.isdisjoint(axes)
            axes, of_row = ("target", *axes) if targets else axes, {key: row[key] for key in ("reason", "source")}
            yield Exclusion(name=name, axes=axes, when=when, targets=targets, reads_shapes=reads_shapes, **of_row)


def _condition(name: str, row: Mapping[str, Any]) -> tuple[tuple[str, ...], Callable[[Case], int]]:
    """Return the axes that a rule reads, and its condition: selectors, or code of this file or of a plug-in."""
    if "where" in row:
        selectors = tuple(map(parse_selector, row["where"]))
        axes = tuple(dict.fromkeys(name for selector in selectors for name in axes_read(selector)))
        return axes, lambda case: any(selector.matches(case) for selector in selectors)
    if "when" in row:
        return (*row["axes"], *MODEL_AXES), load(row["when"])
    return _CODED[name]


EXCLUSIONS = tuple(_exclusions())

# The same requirement is worded differently in the meta registration ("Expected self.size(1) to be divisible by 16, …",
# "Expected both dimensions of mat2 to be divisible by 16 ...") and in the CUDA kernel ("Expected trailing dimension of
# mat1 to be divisible by 16 ...", "mat2 shape (128x1128) must be divisible by 16"). Blocks are refused by assertions of
# torchao's, or by the matmul of the forward where it is before them.
_ALIGNMENT_PATTERN = (
    r"Expected self\.size\(1\) to be divisible by 16"
    r"|Expected both dimensions of mat2 to be divisible by 16"
    r"|Expected trailing dimension of mat1 to be divisible by 16"
    r"|mat2 shape \(.*must be divisible by 16"
    r"|columns must be divisible by inner block size"
    r"|(?:rows|cols) must be a multiple of 32"
    r"|must be divisible by block_size \(block_size=128\)"
    r"|AssertionError: unsupported$"  # a converted linear whose features are no multiple of 128
)

_refused_alignment = functools.partial(Refusal, check="alignment", pattern=_ALIGNMENT_PATTERN)
REFUSALS: tuple[Refusal, ...] = (
    _refused_alignment(
        name="block_alignment",
        reason="a weight dimension of a converted linear inside a block, as one TP rank holds it, is not a multiple of "
        "16 (MXFP8: 32, blockwise: 128); pad_inner_dim cannot help, because every weight dimension is an output "
        "dimension of a matmul",
        source=_META,
        axes=(*MODEL_AXES, "tp", *_CONVERSION_AXES),
        when=lambda case: _misaligned_weights(case, output=False),
    ),
    _refused_alignment(
        name="output_alignment",
        reason="the converted output layer holds a shard of the vocabulary that is not a multiple of 16 (MXFP8: 32, "
        "blockwise: 128); pad_inner_dim cannot help, because the shard is the output dimension of the forward matmul; "
        "padding the vocabulary to a multiple of 16 * tp (32 * tp, 128 * tp) can",
        source=_META,
        axes=(*VOCABULARY_AXES, *MODEL_AXES, "tp", "output_layer", *_CONVERSION_AXES),
        when=lambda case: _misaligned_weights(case, output=True),
    ),
    _refused_alignment(
        name="token_alignment",
        reason="the tokens per rank are the inner dimension of the weight-gradient matmul and not a multiple of 16 "
        "(MXFP8: 32, blockwise: 128); pad_inner_dim or a recipe with the weight gradient in high precision "
        "(with_gw_hp) make the case valid",
        source=f"{_TORCHAO}/float8_linear.py",
        axes=("target", "global_batch", "accumulation", "seq_len", *DP_AXES, "cp", "recipe", "casts", "pad_inner_dim"),
        when=_misaligned_tokens,
    ),
)


Capability = tuple[int, int]


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a need is met, None if it is not known: that is in no one's way.

    `peers`: every GPU can read the memory of the others.
    """

    capability: Capability | None = None
    peers: bool | None = None


class Need(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row. `where`: selectors of the cases that it is about; without `since` and `peers` no GPU meets it."""

    where: tuple[str, ...]
    reason: str
    source: str
    name: str = ""  # the key of the row
    since: str = msgspec.field(name="from", default="")  # compute capability, such as "9.0"
    below: str = ""
    peers: bool = False
    kernel: bool = False  # torch's float8 matmul needs it, and the exact one does not
    exact: bool = False  # `--device auto` takes the exact matmul instead

    def is_about(self, case: Case) -> bool:
        return any(parse_selector(text).matches(case) for text in self.where)

    def is_met(self, facts: GpuFacts) -> bool:
        if self.peers:
            return facts.peers is not False
        if not self.since:
            return False
        return facts.capability is None or _parsed(self.since) <= facts.capability < _parsed(self.below or "1000.0")


def _parsed(capability: str) -> Capability:
    major, minor = capability.split(".")
    return int(major), int(minor)


@functools.cache
def gpu_needs() -> tuple[Need, ...]:
    """Return all rows of `gpu_needs.toml`, in the order in which reasons are given."""
    text = Path(__file__).with_name("gpu_needs.toml").read_text(encoding="utf-8")
    rows = msgspec.convert(tomllib.loads(text), dict[str, Need])
    return tuple(msgspec.structs.replace(row, name=name, reason=_reason(row)) for name, row in rows.items())


def _reason(row: Need) -> str:
    return row.reason.format(needed=f"{row.since.partition('.')[0]}.x" if row.below else row.since)


def unmet_needs(case: Case, facts: GpuFacts, *, exact: bool) -> Iterator[Need]:
    """Yield the needs of a case that GPUs do not meet. `exact`: it multiplies float8 with the exact matmul."""
    for need in gpu_needs():
        if need.is_about(case) and not (exact and need.kernel) and not need.is_met(facts):
            yield need
