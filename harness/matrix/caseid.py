"""Case ids: the one readable spelling of every case, safe as a file name, and its parser.

An id is a list of tokens joined by `-`: layout, recipe, vocabulary and dtype always, everything else only where it
differs from its default. Ids consist of `A-Z a-z 0-9 . _ + -`. Numbers are spelled so that they round-trip exactly.
"""

from __future__ import annotations

import re

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes
from harness.matrix.case import Case, Checkpointing, Checks, Float8, Layout, Model, Train
from harness.matrix.scope import out_of_scope
from harness.matrix.targets import REFERENCE
from harness.matrix.words import DTYPES, NUMBER, PRESETS, SHAPE_WORDS, hint, values_of

_MAX_LENGTH = 1000  # far above any id that fits into a file name; limits the work on invalid input
# A floating-point number may contain a minus (`lr1e-05`), and so may the preset that a file names.
_WITH_MINUS = "|".join(map(re.escape, (preset for preset in PRESETS if "-" in preset)))
_TOKEN = re.compile(rf"(?:(?:lr|clip|tol\.){NUMBER}|{_WITH_MINUS}|[^-]+)(?=-|$)")


def case_id(case: Case) -> str:
    """The id of a case: equal for equal cases, different for different ones."""
    return "-".join(
        (
            *_target_tokens(case),
            *_layout_tokens(case.layout),
            *_float8_tokens(case.float8),
            *_checkpointing_tokens(case),
            *([] if case.compile == "none" else [case.compile]),
            *([] if case.model.preset == "tiny" else [PRESETS[case.model.preset]]),
            *_override_tokens(case.model),
            f"v{case.model.vocab_size}",
            *([] if case.model.pad_vocab_to_multiple_of == 1 else [f"vpad{case.model.pad_vocab_to_multiple_of}"]),
            *_train_tokens(case.train),
            DTYPES[case.train.dtype],
            *([] if case.checks.loss_tolerance is None else [f"tol.{case.checks.loss_tolerance!r}"]),
        )
    )


def parse_case_id(text: str) -> Case:
    """The case of an id. Raises HarnessError with a suggestion for an unknown token or a non-canonical spelling."""
    values: dict[str, object] = {}
    for token in id_words(text):
        found = values_of(token)
        if found is None:
            raise HarnessError(f"unknown token '{token}'.", where=f"case id '{text}'", fix=hint(token))
        values |= found
    try:
        case = case_from_axes(values)
    except HarnessError as error:
        raise HarnessError(error.what, where=f"case id '{text}'", fix=error.fix) from error
    if case_id(case) != text:
        outside = next(filter(None, map(out_of_scope, id_words(text))), None)
        what = "not the canonical spelling of a case id." if outside is None else f"{outside.text}."
        raise HarnessError(what, where=f"case id '{text}'", fix=f"write {case_id(case)}")
    return case


def id_words(text: str) -> list[str]:
    """The words of an id, which may not be known. Raises HarnessError for a text that is no list of words."""
    tokens = []
    position = 0
    while position < len(text) <= _MAX_LENGTH:
        found = _TOKEN.match(text, position)
        if found is None:
            break
        tokens.append(found.group())
        position = found.end() + 1
    if not tokens or "-".join(tokens) != text:
        raise HarnessError("not a case id: expected tokens joined by single '-'.", where=f"case id '{text}'")
    return tokens


def mesh_words(layout: Layout) -> str:
    """The words for the mesh of a layout alone: "fsdp2-tp2", "single"."""
    mesh = {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "tp", "async_tp")}
    return "-".join(_layout_tokens(Layout(**mesh)))


def family_id(case: Case) -> str:
    """The name of the golden that this case is compared with: everything that determines data, weights and updates.

    Without layout, float8, checkpointing, compile, dtype, padding of the vocabulary and checks. Defaults are spelled
    out, so that a changed default cannot change the meaning of an old golden.
    """
    train = case.train
    return "-".join(
        (
            *_target_tokens(case),
            PRESETS[case.model.preset],
            *_override_tokens(case.model),
            f"v{case.model.vocab_size}",
            f"s{train.steps}",
            f"gb{train.global_batch}",
            f"sl{train.seq_len}",
            *([] if train.max_norm is None else [f"clip{train.max_norm!r}"]),
            *([] if train.ignored_tokens == "none" else [f"ignore.{train.ignored_tokens}"]),
            f"lr{train.lr!r}",
            f"seed{train.seed}",
            *([] if train.parameter_dtype == "float32" else [f"param.{DTYPES[train.parameter_dtype]}"]),
        )
    )


def family_case(family: str) -> Case | None:
    """The reference case of a family; None for a text that is no family."""
    values: dict[str, object] = {"dtype": "bfloat16"}
    try:
        for token in id_words(family):
            values |= values_of(token) or {}
        case = case_from_axes(values)
    except HarnessError:
        return None
    return case if family_id(case) == family else None


def solo_case(case: Case) -> Case:
    """The case whose solo witness is used for `case`: without all options that must not change a number.

    These are tensor parallelism and its styles, checkpointing, compile, evaluation, resuming, and the split of dp into
    shards and replicas, unless both sums of that split are rounded.
    """
    layout = case.layout
    rounds_twice = case.train.reduce_dtype == "bfloat16"
    split = Layout(dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard)
    return msgspec.structs.replace(
        case,
        layout=split if rounds_twice else Layout(dp_shard=layout.dp),
        float8=msgspec.structs.replace(case.float8, tp_styles="plain"),
        checkpointing=Checkpointing(),
        compile="none",
        train=msgspec.structs.replace(case.train, evaluate=False, resume="none"),
        checks=Checks(),
    )


def twin_case(case: Case) -> Case:
    """The BF16 twin of a case: the same layout without FP8, checkpointing, evaluation and resuming, in bfloat16."""
    train = msgspec.structs.replace(case.train, dtype="bfloat16", evaluate=False, resume="none")
    return msgspec.structs.replace(
        case, float8=Float8(), checkpointing=Checkpointing(), compile="none", train=train, checks=Checks()
    )


def reference_case(case: Case) -> Case:
    """The case whose run is the golden: bf16 on one rank, without all options that must not change a loss."""
    return Case(
        target=case.target,
        model=msgspec.structs.replace(case.model, pad_vocab_to_multiple_of=1),
        train=msgspec.structs.replace(
            case.train,
            dtype="bfloat16",
            reduce_dtype="float32",
            accumulation=1,
            reduce_grads="every_microbatch",
            evaluate=False,
            resume="none",
        ),
    )


def layout_id(layout: Layout) -> str:
    """How an id spells a layout, such as "fsdp2-tp2"."""
    return "-".join(_layout_tokens(layout))


def _target_tokens(case: Case) -> list[str]:
    return [] if case.target == REFERENCE else [f"target.{case.target}"]


def _layout_tokens(layout: Layout) -> list[str]:
    tokens = []
    if layout.dp_shard > 1:
        hsdp = layout.dp_replicate > 1
        tokens.append(f"hsdp{layout.dp_replicate}x{layout.dp_shard}" if hsdp else f"fsdp{layout.dp_shard}")
    elif layout.dp_replicate > 1:
        tokens.append(f"ddp{layout.dp_replicate}")
    if layout.tp > 1 or layout.async_tp:
        tokens.append(f"{'atp' if layout.async_tp else 'tp'}{layout.tp}")
    if layout.symm_mem == "fallback":
        tokens.append("fallback")
    if not layout.wait_for_embedding:
        tokens.append("nowait")
    if not layout.sequence_parallel:
        tokens.append("nosp")
    if not layout.loss_parallel:
        tokens.append("nolp")
    if layout.reshard_after_forward != "default":
        tokens.append(f"reshard.{layout.reshard_after_forward}")
    return tokens or ["single"]


def _float8_tokens(float8: Float8) -> list[str]:
    gather = {(True, False): ["ag.fp8"], (True, True): ["ag.fp8pre"], (False, True): ["ag.pre"], (False, False): []}
    return [
        float8.recipe,
        *gather[float8.fp8_all_gather, float8.precompute_scale],
        *(["tpstyle.fp8"] if float8.tp_styles == "float8" else []),
        *(["head.fp8"] if float8.output_layer else []),
        *(["pad"] if float8.pad_inner_dim else []),
        *([f"filter.{'+'.join(float8.filter_fqns)}"] if float8.filter_fqns else []),
        *([f"casts.{'+'.join(float8.casts).replace(':', '.')}"] if float8.casts else []),
    ]


def _checkpointing_tokens(case: Case) -> list[str]:
    layers = f"ac.layer{case.checkpointing.every}"
    tokens = {"none": [], "full": ["ac.full"], "selective_op": ["ac.op"], "selective_layer": [layers]}
    return tokens[case.checkpointing.mode]


def _override_tokens(model: Model) -> list[str]:
    sizes = [f"{word}.{getattr(model, name)}" for name, word in SHAPE_WORDS.items() if getattr(model, name)]
    return [*sizes, *(["bias"] if model.bias else [])]


def _train_tokens(train: Train) -> list[str]:
    default = Train()
    spelled = {
        f"gb{train.global_batch}": train.global_batch != default.global_batch,
        f"sl{train.seq_len}": train.seq_len != default.seq_len,
        f"s{train.steps}": train.steps != default.steps,
        f"accum{train.accumulation}": train.accumulation != default.accumulation,
        "reduce.last": train.reduce_grads != default.reduce_grads,
        f"clip{train.max_norm!r}": train.max_norm != default.max_norm,
        "eval": train.evaluate,
        f"ignore.{train.ignored_tokens}": train.ignored_tokens != default.ignored_tokens,
        "resume": train.resume == "same",
        "resume.resharded": train.resume == "resharded",
        f"lr{train.lr!r}": train.lr != default.lr,
        f"seed{train.seed}": train.seed != default.seed,
        f"param.{DTYPES[train.parameter_dtype]}": train.parameter_dtype != default.parameter_dtype,
        f"reduce.{DTYPES[train.reduce_dtype]}": train.reduce_dtype != default.reduce_dtype,
    }
    return [token for token, needed in spelled.items() if needed]
