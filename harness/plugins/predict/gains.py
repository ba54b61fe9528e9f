"""What FP8 gains: speed-ups by recipe and linear, what a vocabulary costs, and curves around a case."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from harness.expect.traffic import expected_transfers
from harness.expect.work import ALIGNMENT, Gemm, gemms
from harness.matrix.case import Case, Float8
from harness.matrix.known import KnownFault
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN, is_converted, linear_features, linear_name, shard_sizes
from harness.matrix.recipes import MatmulRole, block_recipe
from harness.matrix.rules import exclusions, expected_refusal
from harness.plugins.predict.cost import tokens_per_device
from harness.plugins.predict.machine import Machine, Peak
from harness.plugins.predict.roofline import EAGER_KERNELS, cast_s, casts, gemm_s, once_s, predicted_step, speed_up

_DIMS = (512, 1024, 2048, 4096, 8192, 16384)
_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_HEAD_DIM, _HEADS = 128, 8
_PARAMETER_BYTES = 4 + 4 + 8  # the float32 weight, its gradient, and AdamW's two moments


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train in FP8: how many times as fast as in BF16, or the rule that refuses it, with its reason."""

    name: str
    compiled: float | None = None
    eager: float | None = None
    tokens_s: float | None = None  # of a device, compiled
    refused: str = ""
    reason: str = ""
    fault: str = ""  # on record, that such training runs into

    @property
    def ratio(self) -> float:
        """Compiled; 0 where it is refused."""
        return self.compiled or 0.0


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """One matmul of a linear on one rank: its shape after sharding, and the time of one execution in microseconds."""

    role: MatmulRole
    m: int
    n: int
    k: int
    aligned: bool
    refused: bool  # by `torch._scaled_mm`, padded as it is
    bf16_us: float
    float8_us: float


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """One linear of all blocks, or the output layer, in BF16 and in float8: milliseconds of one rank and step.

    `gain`: how many times as fast as in BF16 it is in float8, casts and padding included. `refused`: one of its float8
    matmuls is.
    """

    name: str
    count: int
    converted: bool
    refused: bool
    gain: float
    bf16_ms: float
    float8_ms: float
    cast_ms: float
    padding_ms: float
    matmuls: tuple[Matmul, ...]


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train a vocabulary under tensor parallelism, and what it costs one rank.

    `shards`: the rows of the output layer that ranks hold, each size once. `refused`: of them those that float8
    matmuls refuse, as they are no `multiple`. `added_bytes`: what the rows that padding adds take for the embedding and
    the output layer, with gradients and AdamW, if nothing else shards them. `output_ms`: matmuls and casts of the
    output layer in a step.
    """

    name: str
    shards: tuple[int, ...]
    refused: tuple[int, ...]
    multiple: int
    added_rows: int
    added_bytes: int
    output_ms: float


def variants(case: Case, device: Peak) -> dict[str, Case]:
    """The case with every recipe of the device, by name: as torchtitan uses them, and with what makes them faster."""
    base = replace(case.float8, casts=(), fp8_all_gather=False, precompute_scale=False, tp_styles="plain")
    tensorwise = replace(base, recipe="tensorwise", tp_styles="float8" if case.layout.tp > 1 else "plain")
    rowwise = replace(base, recipe="rowwise")
    settings = {"tensorwise": tensorwise}
    if case.layout.dp_shard > 1:
        settings["tensorwise, float8 all-gather"] = replace(tensorwise, fp8_all_gather=True, precompute_scale=True)
    settings["rowwise"] = rowwise
    small = too_small_for_rowwise(case)
    if 0 < len(small) < len(BLOCK_LINEARS):
        names = ", ".join(name.rpartition(".")[2] for name in small)
        settings[f"rowwise, {names} in BF16"] = replace(rowwise, filter_fqns=(*rowwise.filter_fqns, *small))
    settings["rowwise_with_gw_hp"] = replace(base, recipe="rowwise_with_gw_hp")
    for wgrad in (True, False) if device.mxfp8 else ():
        if recipe := block_recipe(rounds_scales_down=False, wgrad=wgrad):
            settings[recipe] = replace(base, recipe=recipe, pad_inner_dim=False)
    return {name: replace(case, float8=float8) for name, float8 in settings.items()}


def too_small_for_rowwise(case: Case) -> tuple[str, ...]:
    """Linears of blocks that torchao's `_auto_filter_for_recipe` (0.18) does not convert with the recipe rowwise.

    By the size of the whole weight: linears are converted before they are sharded.
    """
    sizes = {name: linear_features(case, name) for name in BLOCK_LINEARS}
    return tuple(name for name, (k, n) in sizes.items() if n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))


def costed(name: str, case: Case, faults: Sequence[KnownFault], machine: Machine) -> Variant:
    """What a way to train is predicted to bring."""
    judged = replace(case, compile="none") if case.float8.traits.in_blocks else case  # no CPU generates its casts
    in_bf16 = exclusions(replace(judged, float8=Float8()))  # rules that are about the harness, not about FP8
    rule = next((rule for rule in exclusions(judged) if rule not in in_bf16), expected_refusal(case))
    if rule is not None:
        return Variant(name=name, refused=rule.name, reason=rule.reason)
    graphs, eager = compiled(case), replace(case, compile="none", layout=replace(case.layout, async_tp=False))
    return Variant(
        name=name,
        compiled=speed_up(graphs, machine),
        eager=speed_up(eager, machine),
        tokens_s=tokens_per_device(graphs, predicted_step(graphs, machine).total_s),
        fault=faults[0].name if faults else "",
    )


def compiled(case: Case) -> Case:
    return case if case.compile != "none" else replace(case, compile="inductor")


def conversions(case: Case, machine: Machine) -> tuple[Conversion, ...]:
    """Every linear in the order of a block, then the output layer. A linear that is kept is costed as if converted."""
    converted = replace(case, float8=replace(case.float8, output_layer=True, filter_fqns=()))
    pairs: defaultdict[str, list[tuple[Gemm, Gemm]]] = defaultdict(list)
    for pair in zip(gemms(replace(case, float8=Float8())), gemms(converted), strict=True):
        pairs[linear_name(pair[0].fqn)].append(pair)
    cast_by_name: defaultdict[str, float] = defaultdict(float)
    for cast in casts(converted):
        cast_by_name[linear_name(cast.fqn)] += cast_s(cast, machine)
    return tuple(
        _conversion(case, name, pairs[name], cast_by_name[name] * 1e3, machine) for name in (*BLOCK_LINEARS, OUTPUT_FQN)
    )


def _conversion(
    case: Case, name: str, pairs: Sequence[tuple[Gemm, Gemm]], cast_ms: float, machine: Machine
) -> Conversion:
    """`pairs`: its matmuls in BF16 and in float8."""
    fqn = pairs[0][0].fqn
    padding_ms = sum(scaled.padding_bytes for _, scaled in pairs) / machine.memory_bytes_s * 1e3
    bf16_ms = sum(gemm_s(plain, machine) for plain, _ in pairs) * 1e3
    float8_ms = sum(gemm_s(scaled, machine) for _, scaled in pairs) * 1e3
    matmuls = tuple(
        Matmul(
            role=scaled.role,
            m=scaled.m,
            n=scaled.n,
            k=scaled.k,
            aligned=scaled.aligned,
            refused=scaled.refused,
            bf16_us=once_s(plain, machine) * 1e6,
            float8_us=once_s(scaled, machine) * 1e6,
        )
        for plain, scaled in pairs
        if plain.fqn == fqn
    )
    return Conversion(
        name=name,
        count=len({plain.fqn for plain, _ in pairs}),
        converted=is_converted(case, fqn),
        refused=any(matmul.refused for matmul in matmuls),
        gain=bf16_ms / (float8_ms + cast_ms + padding_ms),
        bf16_ms=bf16_ms,
        float8_ms=float8_ms,
        cast_ms=cast_ms,
        padding_ms=padding_ms,
        matmuls=matmuls,
    )


def vocabularies(case: Case, machine: Machine) -> tuple[Vocabulary, ...]:
    """The ways to train the vocabulary of a case: as it is and padded, with the output layer in float8 and not."""
    own, multiple = case.model.vocab_size, case.float8.traits.multiple * case.layout.tp
    multiples = (1,) if own % multiple == 0 else (1, multiple)
    return tuple(_vocabulary(case, pad_to, float8, machine) for pad_to in multiples for float8 in (True, False))


def _vocabulary(case: Case, multiple: int, float8: bool, machine: Machine) -> Vocabulary:
    tp, own = case.layout.tp, case.model.vocab_size
    model = replace(case.model, pad_vocab_to_multiple_of=multiple, layers=1)
    candidate = replace(case, model=model, float8=replace(case.float8, output_layer=float8))
    rows = model.padded_vocab_size
    shards = tuple(dict.fromkeys(shard_sizes(rows, tp)))
    output_s = sum(gemm_s(gemm, machine) for gemm in gemms(candidate) if gemm.fqn == OUTPUT_FQN)
    output_s += sum(cast_s(cast, machine) for cast in casts(candidate) if cast.fqn == OUTPUT_FQN)
    return Vocabulary(
        name=f"{rows} rows, output layer in {'float8' if float8 else case.train.dtype}",
        shards=shards,
        refused=tuple(shard for shard in shards if float8 and shard % case.float8.traits.multiple),
        multiple=case.float8.traits.multiple,
        added_rows=_added_rows(own, rows, tp),
        added_bytes=added_bytes(own, rows, tp, case.model.shape.dim),
        output_ms=output_s * 1e3,
    )


def padded_size(vocab_size: int, tp: int) -> int:
    """The smallest vocabulary of at least this size whose shards on `tp` ranks are equal multiples of 16."""
    multiple = ALIGNMENT * tp
    return -(-vocab_size // multiple) * multiple


def added_bytes(vocab_size: int, padded: int, tp: int, dim: int) -> int:
    """What the rows that padding adds take on one of `tp` ranks: of the embedding and of the output layer."""
    return 2 * _added_rows(vocab_size, padded, tp) * dim * _PARAMETER_BYTES


def _added_rows(vocab_size: int, padded: int, tp: int) -> int:
    return -(-padded // tp) - -(-vocab_size // tp)


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Named lines over the same `places`, whose meaning is `across`; `logarithmic`: places are powers."""

    title: str
    across: str
    places: tuple[int, ...]
    lines: Mapping[str, tuple[float, ...]]
    logarithmic: bool = False


def plots(case: Case, machine: Machine) -> tuple[Plot, ...]:
    case = replace(case, train=replace(case.train, dtype="bfloat16"))
    return (_over_size(case, machine), _over_vocabulary(case), _over_world(case))


def _over_size(case: Case, machine: Machine) -> Plot:
    least = max(_HEADS, case.layout.tp)
    models = (
        replace(case.model, dim=dim, heads=max(least, dim // _HEAD_DIM), kv_heads=least, ffn_dim=4 * dim)
        for dim in _DIMS
    )
    ways = [variants(replace(case, compile="inductor", model=model), machine.peak) for model in models]
    return Plot(
        title="predicted speed over BF16, compiled blocks",
        across="dim of the model, with heads of 128 and ffn_dim of 4 dim",
        places=_DIMS,
        lines={
            recipe: tuple(speed_up(by_recipe[recipe], machine) for by_recipe in ways)
            for recipe in EAGER_KERNELS
            if recipe in ways[0]
        },
        logarithmic=True,
    )


def _over_vocabulary(case: Case) -> Plot:
    tp, own, dim = case.layout.tp, case.model.vocab_size, case.model.shape.dim
    step = max(1, tp // 2) * 8
    first = max(step, own - 16 * step)
    places = tuple(sorted({own, *range(first - first % step, own + 16 * step, step)}))
    return Plot(
        title=f"MB that padding the vocabulary to a multiple of {16 * tp} adds to a rank",
        across="vocabulary",
        places=places,
        lines={"MB": tuple(added_bytes(size, padded_size(size, tp), tp, dim) / 1e6 for size in places)},
    )


def _over_world(case: Case) -> Plot:
    sharded = [replace(case, layout=replace(case.layout, dp_shard=ranks)) for ranks in _RANKS]
    wide = replace(case.float8, fp8_all_gather=False, precompute_scale=False)
    narrow = replace(wide, recipe="tensorwise", casts=(), fp8_all_gather=True, precompute_scale=True)
    in_bf16, in_float8 = (
        [_received_gb(replace(sharded_case, float8=float8)) for sharded_case in sharded] for float8 in (wide, narrow)
    )
    return Plot(
        title="GB that FSDP brings to a rank in one step",
        across="world size",
        places=tuple(sharded_case.layout.world_size for sharded_case in sharded),
        lines={
            "weights gathered in BF16": tuple(gathered for gathered, _ in in_bf16),
            "weights gathered in float8": tuple(gathered for gathered, _ in in_float8),
            "gradients reduced in float32": tuple(reduced for _, reduced in in_bf16),
        },
        logarithmic=True,
    )


def _received_gb(case: Case) -> tuple[float, float]:
    sent, others = fsdp_bytes(case), case.layout.dp_shard - 1
    return sent["all_gather"] * others / 1e9, sent["reduce_scatter"] * others / (others + 1) / 1e9


def fsdp_bytes(case: Case) -> Counter[str]:
    """The inputs of FSDP's collectives on a rank in one step, by kind."""
    sent: Counter[str] = Counter()
    for transfer in expected_transfers(case, step=2, rank=0):
        if transfer.axis == "dp_shard":
            sent[transfer.kind] += transfer.payload_bytes
    return sent
