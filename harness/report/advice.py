"""The advice about a case as text: speed-ups by recipe, the linears, the vocabulary, and recommendations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.performance.advice import Advice
from harness.performance.gains import Conversion, Variant
from harness.performance.roofline import Step

VARIANT_COLUMNS = ("recipe", "compiled", "eager", "tokens/s", "known fault, or rule that refuses it")
LINEAR_COLUMNS = (
    "linear", "float8", "matmul", "m", "n", "k", "16", "BF16 us", "FP8 us", "BF16 ms", "FP8 ms", "casts ms", "gain"
)  # fmt: skip
VOCABULARY_COLUMNS = ("vocabulary", "shards", "float8 takes it", "rows added", "memory added", "output ms")
STEP_COLUMNS = ("part of a step", "BF16 ms", "FP8 ms")
_PARTS = {
    "matmul_s": "matmuls",
    "cast_s": "casts",
    "padding_s": "padding of operands",
    "attention_s": "attention",
    "memory_s": "norms, activations, loss, optimizer, copies",
    "tensor_parallel_s": "collectives of tensor parallelism",
    "data_parallel_s": "what FSDP's collectives add",
    "other_s": "other",
    "dispatch_s": "dispatch, behind which kernels run",
    "total_s": "step",
}


def advice_text(found: Advice) -> str:
    """All tables and sentences."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Advice) -> Iterator[str]:
    yield f"{found.case} on {found.device}: predicted, not measured"
    yield ""
    yield f"times as fast as BF16, which is predicted to train {found.tokens_s:,.0f} tokens/s and device"
    yield from _table(VARIANT_COLUMNS, variant_rows(found.variants))
    yield ""
    yield from _table(STEP_COLUMNS, step_rows(found))
    yield ""
    yield f"one rank and step with {found.recipe}; gain: of all its matmuls with their casts"
    yield from _table(LINEAR_COLUMNS, linear_rows(found.linears))
    yield ""
    yield from _table(VOCABULARY_COLUMNS, vocabulary_rows(found))
    yield ""
    yield from found.recommendations
    yield ""
    yield "assumptions"
    yield from (f"  {line}" for line in found.assumptions)


def variant_rows(variants: Sequence[Variant]) -> list[tuple[str, ...]]:
    """A row for every way to train in FP8."""
    return [
        (each.name, "refused", "refused", "-", each.refused)
        if each.refused
        else (each.name, f"{each.compiled:.2f}", f"{each.eager:.2f}", f"{each.tokens_s:,.0f}", each.fault)
        for each in variants
    ]


def step_rows(found: Advice) -> list[tuple[str, ...]]:
    """A row for every part of a step that takes time."""

    def ms(step: Step, field: str) -> float:
        return float(getattr(step, field)) * 1e3

    named = {name: (ms(found.bf16, field), ms(found.float8, field)) for field, name in _PARTS.items()}
    return [(name, _short(bf16), _short(float8)) for name, (bf16, float8) in named.items() if bf16 or float8]


def linear_rows(linears: Sequence[Conversion]) -> list[tuple[str, ...]]:
    """A row for every matmul of every linear."""
    return [row for each in linears for row in _of_linear(each)]


def _of_linear(each: Conversion) -> Iterator[tuple[str, ...]]:
    kept = "refused" if each.converted and each.refused else "yes" if each.converted else "kept"
    times = (each.bf16_ms, each.float8_ms, each.cast_ms + each.padding_ms)
    sums = (*map(_short, times), f"{each.gain:.2f}")
    for first, matmul in enumerate(each.matmuls):
        yield (
            *((f"{each.name} x{each.count}", kept) if not first else ("", "")),
            matmul.role,
            *(str(size) for size in (matmul.m, matmul.n, matmul.k)),
            "yes" if matmul.aligned else "refused" if matmul.refused else "no",
            _short(matmul.bf16_us),
            _short(matmul.float8_us),
            *(sums if not first else ("",) * len(sums)),
        )


def vocabulary_rows(found: Advice) -> list[tuple[str, ...]]:
    """A row for every way to train the vocabulary."""
    return [
        (
            each.name,
            ", ".join(map(str, each.shards)),
            f"no: {', '.join(map(str, each.refused))} is no multiple of 16" if each.refused else "yes",
            str(each.added_rows),
            f"{_short(each.added_bytes / 1e6)} MB",
            "-" if each.refused else _short(each.output_ms),
        )
        for each in found.vocabulary
    ]


def _short(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width; a last cell that is longer than others widens nothing."""
    lines = [columns, *rows]
    widths = [max(len(line[at]) for line in lines if len(line[at]) < 60) for at in range(len(columns))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
