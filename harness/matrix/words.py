"""The words of case ids: every token that an id can have, what it means and which axis values it stands for.

`caseid.py` puts them together. Here are also the hints for a token that is no such word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from harness.hints import list_words
from harness.matrix.axes import AXES
from harness.matrix.case import MODEL_PRESETS
from harness.matrix.scope import out_of_scope
from harness.matrix.targets import NAME

NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
SHAPE_WORDS = {"dim": "dim", "layers": "layers", "heads": "heads", "kv_heads": "kvheads", "ffn_dim": "ffn"}
PRESETS = {preset: preset.replace("-", ".") for preset in MODEL_PRESETS}  # `-` separates tokens
DTYPES = {"float64": "f64", "float32": "f32", "bfloat16": "b16"}

_Reader = Callable[[re.Match[str]], dict[str, object]]


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A token, or with a number in it, a family of tokens. `{0}` in `meaning` is what the pattern's first group holds.

    `stem` is what comes before the number; empty for a token without one.
    """

    part: str
    example: str
    meaning: str
    pattern: re.Pattern[str]
    read: _Reader
    stem: str = ""


def values_of(token: str) -> dict[str, object] | None:
    """The axis values that a token stands for; None when it is no word of an id."""
    found = _match(token)
    return None if found is None else found[0].read(found[1])


def meaning_of(token: str) -> str:
    """What a token means; it must be a word of an id."""
    found = _match(token)
    assert found is not None, f"'{token}' is no word of an id"
    return found[0].meaning.format(*found[1].groups())


def hint(token: str) -> str:
    """The `fix` for an unknown token: the likely meaning if there is one, else the command that lists all words."""
    outside = out_of_scope(token)
    if outside is not None:
        return f"leave it out: {outside.text}."
    near = _for_axis(token) or _similar(token)
    return f"did you mean {' or '.join(near)}?" if near else f"see `{list_words()}`."


def _flag(part: str, token: str, meaning: str, **values: object) -> Word:
    return Word(part=part, example=token, meaning=meaning, pattern=re.compile(re.escape(token)), read=lambda _: values)


def _numbered(
    part: str, stem: str, number: str, meaning: str, axis: str, *, kind: type[Any] = int, **values: object
) -> Word:
    digits = r"\d+" if kind is int else NUMBER
    return Word(
        part=part,
        example=stem + number,
        meaning=meaning,
        pattern=re.compile(rf"{re.escape(stem)}({digits})"),
        read=lambda found: {axis: kind(found[1]), **values},
        stem=stem,
    )


# In the order in which an id has them.
WORDS: tuple[Word, ...] = (
    Word(
        part="target",
        example="target.my_pkg.my_target",
        meaning="trained by {0} instead of the reference Llama",
        pattern=re.compile(rf"target\.({NAME.pattern})", re.ASCII),
        read=lambda found: {"target": found[1]},
    ),
    _flag("layout", "single", "one rank"),
    _numbered("layout", "fsdp", "4", "FSDP2 over {0} ranks", "dp_shard"),
    Word(
        part="layout",
        example="hsdp2x4",
        meaning="HSDP: {0} replicas of {1} shards each",
        pattern=re.compile(r"hsdp(\d+)x(\d+)"),
        read=lambda found: {"dp_replicate": int(found[1]), "dp_shard": int(found[2])},
        stem="hsdp",
    ),
    _numbered("layout", "ddp", "2", "{0} replicas without shards: DDP, which is excluded", "dp_replicate"),
    _numbered("layout", "tp", "4", "tensor parallelism over {0} ranks", "tp"),
    _numbered("layout", "atp", "4", "async tensor parallelism over {0} ranks", "tp", async_tp=True),
    _flag("layout", "fallback", "async TP in torch's unfused reference form", symm_mem="fallback"),
    _flag("layout", "nowait", "blocks get an embedding that is still being gathered", wait_for_embedding=False),
    _flag("layout", "nosp", "TP without sequence parallelism", sequence_parallel=False),
    _flag("layout", "nolp", "TP without loss parallelism", loss_parallel=False),
    _flag("layout", "reshard.always", "FSDP2 gathers all weights again in backward", reshard_after_forward="always"),
    _flag("layout", "reshard.never", "FSDP2 keeps gathered weights until backward", reshard_after_forward="never"),
    _flag("recipe", "bf16", "no FP8: no linear is converted", recipe="bf16"),
    _flag("recipe", "tensorwise", "FP8 with one scale per tensor", recipe="tensorwise"),
    _flag("recipe", "rowwise", "FP8 with one scale per row", recipe="rowwise"),
    _flag("recipe", "rowwise_with_gw_hp", "rowwise, but no FP8 in weight gradients", recipe="rowwise_with_gw_hp"),
    _flag("FP8 options", "ag.fp8", "FSDP2 gathers weights in float8", fp8_all_gather=True),
    _flag(
        "FP8 options", "ag.fp8pre", "ag.fp8 with precomputed weight scales", fp8_all_gather=True, precompute_scale=True
    ),
    _flag("FP8 options", "ag.pre", "precomputed weight scales without ag.fp8: excluded", precompute_scale=True),
    _flag("FP8 options", "tpstyle.fp8", "TP gathers activations in float8 (Float8ColwiseParallel)", tp_styles="float8"),
    _flag("FP8 options", "head.fp8", "the output layer is converted too", output_layer=True),
    _flag("FP8 options", "pad", "inner dimensions are padded to multiples of 16", pad_inner_dim=True),
    Word(
        part="FP8 options",
        example="filter.wk+wq",
        meaning="linears with one of {0} in their names are not converted",
        pattern=re.compile(r"filter\.([a-z0-9_.+]+)"),
        read=lambda found: {"filter_fqns": found[1].split("+")},
    ),
    Word(
        part="FP8 options",
        example="casts.go.e4m3",
        meaning="operands whose cast differs from the recipe: {0}",
        pattern=re.compile(r"casts\.([a-z0-9_]+\.[a-z0-9]+(?:\+[a-z0-9_]+\.[a-z0-9]+)*)"),
        read=lambda found: {"casts": found[1].replace(".", ":").split("+")},
    ),
    _flag("checkpointing", "ac.full", "every block is checkpointed whole", checkpointing="full"),
    _flag("checkpointing", "ac.op", "every second matmul of a block is recomputed", checkpointing="selective_op"),
    _numbered(
        "checkpointing",
        "ac.layer",
        "2",
        "block {0} of every {0} is checkpointed whole",
        "checkpoint_every",
        checkpointing="selective_layer",
    ),
    _flag("compile", "graph", "compiled blocks, as graphs that are executed", compile="graph"),
    _flag("compile", "inductor", "compiled blocks, as code that inductor generates", compile="inductor"),
    *(
        _flag("model", token, f"preset {preset} instead of tiny", model=preset)
        for preset, token in PRESETS.items()
        if preset != "tiny"
    ),
    *(
        _numbered("model", f"{word}.", "512" if name.endswith("dim") else "4", f"{name} {{0}}", name)
        for name, word in SHAPE_WORDS.items()
    ),
    _flag("model", "bias", "the linears of blocks have a bias", bias=True),
    _numbered("vocabulary", "v", "2048", "vocabulary of {0} tokens", "vocab_size"),
    _numbered("vocabulary", "vpad", "128", "padded to a multiple of {0}", "pad_vocab_to_multiple_of"),
    _numbered("training", "gb", "8", "{0} sequences per step, over all ranks", "global_batch"),
    _numbered("training", "sl", "32", "sequences of {0} tokens", "seq_len"),
    _numbered("training", "s", "5", "{0} steps", "steps"),
    _numbered("training", "accum", "2", "{0} microbatches per rank and optimizer step", "accumulation"),
    _flag(
        "training",
        "reduce.last",
        "gradients are reduced after the last microbatch alone",
        reduce_grads="last_microbatch",
    ),
    _numbered("training", "clip", "0.5", "gradients are clipped to a global norm of {0}", "max_norm", kind=float),
    _flag("training", "eval", "the batch of every step is evaluated before it is trained on", evaluate=True),
    _flag(
        "training", "ignore.unequal", "every sequence has fewer labels than the one before", ignored_tokens="unequal"
    ),
    _flag("training", "ignore.half", "the second half of the batch has no labels", ignored_tokens="half"),
    _flag("training", "resume", "state is saved in the middle of the run, and resumed by a new target", resume="same"),
    _flag(
        "training",
        "resume.resharded",
        "resumed through another layout, which loads and saves state",
        resume="resharded",
    ),
    _numbered("training", "lr", "0.001", "learning rate {0}", "lr", kind=float),
    _numbered("training", "seed", "0", "seed {0}", "seed"),
    _flag("training", "param.b16", "parameters are updated in bfloat16", parameter_dtype="bfloat16"),
    _flag("training", "reduce.b16", "gradients are summed over ranks in bfloat16", reduce_dtype="bfloat16"),
    _flag("dtype", "f64", "float64, for sharp comparisons", dtype="float64"),
    _flag("dtype", "f32", "float32", dtype="float32"),
    _flag("dtype", "b16", "bfloat16, with float32 master weights but for param.b16", dtype="bfloat16"),
    _numbered("checks", "tol.", "0.05", "loss may be {0} nats from BF16", "loss_tolerance", kind=float),
)


def _match(token: str) -> tuple[Word, re.Match[str]] | None:
    for word in WORDS:
        found = word.pattern.fullmatch(token)
        if found:
            return word, found
    return None


def _for_axis(token: str) -> list[str]:
    """The words for an axis or for a value of one: `compile`, `steps5`, `bfloat16`."""
    name, number = _cut(token)
    if name in AXES:
        return [_with_number(word, number) for word in _suggested() if name in _sample(word)][:3]
    return sorted((word.example for word in _suggested() if not word.stem and token in _sample(word).values()), key=len)


def _similar(token: str) -> list[str]:
    """Close words of the same kind: with a number like the token, or with a similar head before the same dots."""
    plain = [word.example for word in _suggested() if not word.stem]
    undotted = [word for word in plain if "." in word and _alike(word.replace(".", ""), token, 0.85)]
    if undotted:
        return undotted[:2]
    name, number = _cut(token)
    numbered = {word.stem: word for word in _suggested() if word.stem and _dots(word.stem) == _dots(name)}
    close = difflib.get_close_matches(name, numbered, n=2, cutoff=0.6) if number else []
    same = [word for word in plain if _dots(word) == _dots(token) and _alike(_head(word), _head(token), 0.6)]
    near = difflib.get_close_matches(token, same, n=2, cutoff=0.7)
    return [_with_number(numbered[stem], number) for stem in close] or near


def _suggested() -> Iterable[Word]:
    return (word for word in WORDS if out_of_scope(word.example) is None)


def _sample(word: Word) -> dict[str, object]:
    found = word.pattern.fullmatch(word.example)
    assert found is not None, f"{word.example} is no example of {word.pattern.pattern}"
    return word.read(found)


def _with_number(word: Word, number: str) -> str:
    own = word.stem + number
    return own if word.stem and word.pattern.fullmatch(own) else word.example


def _cut(token: str) -> tuple[str, str]:
    """The token without the number at its end, and the number."""
    found = re.fullmatch(r"(.*?)(\d[\dx.]*)?", token, flags=re.DOTALL)
    assert found is not None, "every text matches"
    return found[1].rstrip("="), found[2] or ""


def _dots(token: str) -> int:
    return token.rstrip(".").count(".")


def _head(token: str) -> str:
    return token.partition(".")[0]


def _alike(one: str, other: str, cutoff: float) -> bool:
    return difflib.SequenceMatcher(None, one, other).ratio() >= cutoff
