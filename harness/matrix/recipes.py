"""FP8: what each recipe does, and how a case is converted to float8.

A recipe is a table of casts: rules and expectations read its properties instead of comparing names. Sources, all of
torchao 0.18: `Float8LinearConfig.from_recipe_name` and `Float8Linear`; `mx_mm` of
`prototype/moe_training/mxfp8_linear.py`; `prototype/blockwise_fp8_training/linear.py`.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self, get_args

import msgspec
from msgspec import Meta

from harness.matrix.axis import Changes, Word, axis, flag
from harness.matrix.model import CaseStruct

Recipe = Literal[
    "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_floor", "mxfp8_with_gw_hp", "blockwise"
]

E4M3, E5M2, E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
FLOAT8_MAX = {E4M3: 448.0, E5M2: 57344.0}  # the largest finite value
ITEM_BYTES = {E4M3: 1, E5M2: 1, "uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}


# The operands of matmuls in torchao's words: those of `output`, and of `grad_input` (gi) and `grad_weight` (gw).
Operand = Literal["i", "i_gw", "w", "w_gi", "go", "go_gw"]
GROUP_MULTIPLE = 8  # rows that a group of high precision is padded to: 16 bytes of bfloat16, as torch's kernel aligns
MatmulRole = Literal["forward", "dgrad", "wgrad"]
OPERANDS: Mapping[MatmulRole, tuple[Operand, Operand]] = {
    "forward": ("i", "w"),
    "dgrad": ("go", "w_gi"),
    "wgrad": ("go_gw", "i_gw"),
}
# The fields of Float8LinearConfig for them.
OPERAND_FIELDS: Mapping[Operand, str] = {
    "i": "cast_config_input",
    "i_gw": "cast_config_input_for_grad_weight",
    "w": "cast_config_weight",
    "w_gi": "cast_config_weight_for_grad_input",
    "go": "cast_config_grad_output",
    "go_gw": "cast_config_grad_output_for_grad_weight",
}
Block = tuple[int, int]  # rows, and values along the contracted dim, that share a scale; 0: all of them
TENSOR, ROW, MX, SLICE, SQUARE = (0, 0), (1, 0), (1, 32), (1, 128), (128, 128)
# What a case may change of a cast, in torchao's words.
_BLOCKS: Mapping[str, Block | None] = {"ten": TENSOR, "axs": ROW, "dis": None}
_DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


class Cast(msgspec.Struct, frozen=True, kw_only=True):
    """How an operand is cast. The layout of its scales is that of the matmul for such a block (`scaled_rules`).

    `rounding` of a scale to a power of two: the largest with which no value saturates, or for `floor` the one below
    amax / 256, with which values above 448 do.
    """

    block: Block = TENSOR
    dtype: str = E4M3
    scale_dtype: str = "float32"
    rounding: Literal["none", "power", "floor"] = "none"


class RecipeTraits(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The properties of one recipe, or of one with other casts.

    `casts`: of every operand, None where it stays in high precision; empty without float8. `kernel`: what of torchao
    casts and multiplies: `Float8Linear`, `mx_mm`, `fp8_blockwise_mm`.
    """

    casts: Mapping[Operand, Cast | None] = {}
    kernel: Literal["float8", "mx", "blockwise"] = "float8"
    is_mm: bool = True  # of a tensor subclass: selective checkpointing counts its matmuls as `aten.mm`
    gathers_weights_in_float8: bool = False  # supports FSDP2's float8 all-gather
    has_tp_styles: bool = False  # supports Float8ColwiseParallel and the other float8 TP styles

    @functools.cached_property
    def converts(self) -> bool:
        return bool(self.casts)

    def _of(self, operands: Iterable[Operand] = get_args(Operand)) -> list[Cast]:
        return [cast for operand in operands if (cast := self.casts.get(operand))]

    def multiplies(self, matmul: MatmulRole) -> bool:
        """Return True if this matmul of a converted linear has float8 operands; else it stays in high precision."""
        return bool(self._of(OPERANDS[matmul]))

    def block_of(self, operand: Operand) -> Block | None:
        """Return which values share a scale; None in high precision."""
        cast = self.casts.get(operand)
        return cast.block if cast else None

    def scales_rows(self, matmul: MatmulRole) -> bool:
        return any(cast.block == ROW for cast in self._of(OPERANDS[matmul]))

    def keeps_tokens_apart(self, matmul: MatmulRole) -> bool:
        """Return True if no scale of this matmul is of several tokens, which the one for weight gradients contracts."""
        cast = self.casts.get(OPERANDS[matmul][0])
        return not self.multiplies(matmul) if matmul == "wgrad" else cast is None or cast.block[0] == 1

    @functools.cached_property
    def one_scale_per_tensor(self) -> bool:
        """Return True if every cast has one scale; otherwise some have one for every row that a matmul contracts."""
        return self.converts and all(cast.block == TENSOR for cast in self._of())

    @functools.cached_property
    def block(self) -> int:
        """Return how many values along the contracted dim share a scale, whatever the size of the dim; 0: all do."""
        return max((cast.block[1] for cast in self._of()), default=0)

    @functools.cached_property
    def power_of_two_scales(self) -> bool:
        return any(cast.rounding != "none" for cast in self._of())

    @functools.cached_property
    def rounds_scales_down(self) -> bool:
        return any(cast.rounding == "floor" for cast in self._of())

    @functools.cached_property
    def grad_output_dtype(self) -> str:
        return next((cast.dtype for cast in self._of(("go", "go_gw"))), E4M3)

    @functools.cached_property
    def scale_dtype(self) -> str:
        return next((cast.scale_dtype for cast in self._of()), "float32")

    @functools.cached_property
    def multiple(self) -> int:
        """Return what every dimension of a scaled matmul must be a multiple of."""
        return max(16, self.block)

    @functools.cached_property
    def group_multiple(self) -> int:
        """What the tokens of an expert are padded to a multiple of: the tile of the grouped matmul, or of its casts."""
        return 128 if self.block else 16

    @functools.cached_property
    def writes_bfloat16(self) -> bool:
        """True if matmuls write bfloat16 whatever the dtype of activations: those that scale rows or blocks do."""
        return any(cast.block != TENSOR for cast in self._of())

    def with_casts(self, settings: Iterable[str]) -> Self:
        """Return these traits with other casts of some operands, each `OPERAND:SETTING`."""
        casts, own = dict(self.casts), next(iter(self._of()), Cast())
        dtype = self.grad_output_dtype
        for operand, _, setting in (word.partition(":") for word in settings):
            block = _BLOCKS.get(setting)
            dtype = _DTYPES.get(setting, dtype)
            if setting in _BLOCKS:
                named = msgspec.convert(operand, Operand)
                casts[named] = block and msgspec.structs.replace(own, block=block, dtype=E4M3)
        for gradient in ("go", "go_gw"):
            if cast := casts.get(gradient):
                casts[gradient] = msgspec.structs.replace(cast, dtype=dtype)
        return msgspec.structs.replace(self, casts=casts)


def _casts(cast: Cast, **others: Cast | None) -> dict[Operand, Cast | None]:
    return {operand: others.get(operand, cast) for operand in get_args(Operand)}


_E5M2 = Cast(dtype=E5M2)
_ROWS = Cast(block=ROW, rounding="power")
_MX = Cast(block=MX, scale_dtype=E8M0, rounding="power")
_SQUARES = Cast(block=SQUARE)
TRAITS: dict[Recipe, RecipeTraits] = {
    "bf16": RecipeTraits(),
    "tensorwise": RecipeTraits(
        casts=_casts(Cast(), go=_E5M2, go_gw=_E5M2), gathers_weights_in_float8=True, has_tp_styles=True
    ),
    "rowwise": RecipeTraits(casts=_casts(_ROWS)),
    "rowwise_with_gw_hp": RecipeTraits(casts=_casts(_ROWS, w_gi=Cast(rounding="power"), i_gw=None, go_gw=None)),
    "mxfp8": RecipeTraits(casts=_casts(_MX), kernel="mx"),
    "mxfp8_floor": RecipeTraits(casts=_casts(msgspec.structs.replace(_MX, rounding="floor")), kernel="mx"),
    "mxfp8_with_gw_hp": RecipeTraits(casts=_casts(_MX, i_gw=None, go_gw=None), kernel="mx"),
    "blockwise": RecipeTraits(
        casts=_casts(Cast(block=SLICE), w=_SQUARES, w_gi=_SQUARES), kernel="blockwise", is_mm=False
    ),
}


# Operators of torchao that cast blocks: of which operand, the contracted dim, whether data and scales come transposed,
# and which results they are.
OPERATORS: dict[str, tuple[Operand, int, bool, bool, slice]] = {
    "triton_to_mxfp8_dim0": ("i", -1, False, False, slice(2)),
    "mxfp8_quantize": ("i", 0, False, False, slice(1, 4, 2)),
    "triton_fp8_blockwise_act_quant_lhs": ("i", -1, False, False, slice(2)),
    "triton_fp8_blockwise_act_quant_rhs": ("i", 0, False, True, slice(2)),
    "triton_fp8_blockwise_act_quant_transposed_lhs": ("i", 0, True, False, slice(2)),
    "triton_fp8_blockwise_weight_quant_rhs": ("w", 0, False, True, slice(2)),
    "triton_fp8_blockwise_weight_quant_transposed_rhs": ("w", -1, True, True, slice(2)),
}


def mx_recipe(*, rounds_scales_down: bool, wgrad: bool) -> Recipe | None:
    """Return the MXFP8 recipe with this rounding of scales, with weight gradients in MXFP8 or in high precision."""
    tables = {(of.kernel, of.rounds_scales_down, of.multiplies("wgrad")): recipe for recipe, of in TRAITS.items()}
    return tables.get(("mx", rounds_scales_down, wgrad))


Name = Annotated[str, Meta(pattern=r"^[a-z0-9_.]+$")]
CastName = Annotated[str, Meta(pattern=r"^((i|i_gw|w|w_gi|go|go_gw):(ten|axs|dis)|go:(e4m3|e5m2))$")]

_axis = functools.partial(axis, part="FP8 options", changes=Changes.ROUNDING, needs=("recipe",))


class Float8(CaseStruct, frozen=True, kw_only=True):
    """How linears are converted. `bf16` converts none and ignores every other field, which then keeps its default.

    `output_layer`: convert the output layer too. `tp_styles`: `float8` uses torchao's Float8ColwiseParallel,
    Float8RowwiseParallel and PrepareFloat8ModuleInput (all-gather in float8); `plain` uses torch's own styles.
    `filter_fqns`: linears whose FQN contains one of these strings are not converted, as in torchtitan.

    `conversion` and `convert_after_tp` are of MXFP8: `module` replaces a linear by MXFP8Linear, `wrapper` wraps its
    weight by `quantize_`, before or after tensor parallelism is applied; at `tp` = 1 that has no meaning.

    `casts` differ from the recipe. Operands of matmuls have torchao's names (`cast_configs` in logs): `i`, `w` and `go`
    are input, weight and grad_output, `i_gw`, `w_gi` and `go_gw` those of grad_weight and grad_input. Each is `ten`,
    with one scale, `axs`, with one for every row, or `dis`: not cast. `go:e4m3`, `go:e5m2`: dtype of grad_output.
    """

    recipe: Recipe = _axis(
        "how linears are converted to FP8; bf16 converts none",
        flag("bf16", "no FP8: no linear is converted", recipe="bf16"),
        flag("tensorwise", "FP8 with one scale per tensor", recipe="tensorwise"),
        flag("rowwise", "FP8 with one scale per row", recipe="rowwise"),
        flag("rowwise_with_gw_hp", "rowwise, but no FP8 in weight gradients", recipe="rowwise_with_gw_hp"),
        flag("mxfp8", "MXFP8: one scale per 32 values, rounded up (RCEIL)", recipe="mxfp8"),
        flag("mxfp8_floor", "MXFP8 whose scales are rounded down (FLOOR)", recipe="mxfp8_floor"),
        flag("mxfp8_with_gw_hp", "MXFP8, but high precision in weight gradients", recipe="mxfp8_with_gw_hp"),
        flag("blockwise", "FP8 with one scale per 128 values, of weights per 128 x 128", recipe="blockwise"),
        part="recipe",
        needs=(),
        everyday=True,
        unset="bf16",
    )
    fp8_all_gather: bool = _axis(
        "FSDP2 gathers weights in float8",
        flag("ag.fp8", "FSDP2 gathers weights in float8", fp8_all_gather=True),
        flag("ag.fp8pre", "ag.fp8 with precomputed weight scales", fp8_all_gather=True, precompute_scale=True),
        same_bits="the gathered shards carry the scale of the full weight, so it does not matter where they are cast",
        unset=False,
    )
    precompute_scale: bool = _axis(
        "compute the scales of all gathered weights at once",
        flag("ag.pre", "precomputed weight scales without ag.fp8: excluded", precompute_scale=True),
        same_bits="the amax of a weight is the same right after its update and right before its use; in the first "
        "step no scale is precomputed",
        unset=False,
    )
    conversion: Literal["module", "wrapper"] = _axis(
        "MXFP8 by replaced modules, or by wrapped weights",
        flag("wrapper", "MXFP8 by weights that quantize_ wraps, in linears of torch", conversion="wrapper"),
        changes=Changes.NOTHING,
        same_bits="a wrapped weight calls the same matmul as the replaced module",
        unset="module",
    )
    convert_after_tp: bool = _axis(
        "convert to MXFP8 after parallelize_module",
        flag("aftertp", "converted after tensor parallelism is applied", convert_after_tp=True),
        changes=Changes.NOTHING,
        same_bits="the same linears multiply the same distributed weights",
        unset=False,
    )
    tp_styles: Literal["plain", "float8"] = _axis(
        "float8: TP gathers activations in float8",
        flag("tpstyle.fp8", "TP gathers activations in float8 (Float8ColwiseParallel)", tp_styles="float8"),
        changes=Changes.NOTHING,
        same_bits="a cast with the scale of the logical tensor is the same before and after an all-gather",
        unset="plain",
    )
    grouped_mm: bool = _axis(
        "convert the grouped matmuls of experts too",
        flag("gmm.fp8", "the grouped matmuls of experts are converted too", grouped_mm=True),
        needs=("recipe", "experts"),
        unset=False,
    )
    output_layer: bool = _axis(
        "convert the output layer too",
        flag("head.fp8", "the output layer is converted too", output_layer=True),
        unset=False,
    )
    pad_inner_dim: bool = _axis(
        "pad inner dimensions of matmuls to multiples of 16",
        flag("pad", "inner dimensions are padded to multiples of 16", pad_inner_dim=True),
        same_bits="where every matmul is aligned there is nothing to pad",
        unset=False,
    )
    filter_fqns: tuple[Name, ...] = _axis(
        "do not convert linears whose name contains one of these",
        Word(
            template="filter.{filter_fqns}",
            example="filter.wk+wq",
            meaning="linears with one of {0} in their names are not converted",
            pattern=r"[a-z0-9_.+]+",
        ),
        unset=(),
    )
    casts: tuple[CastName, ...] = _axis(
        "operands whose cast differs from the recipe: go:e4m3, i_gw:dis, w_gi:ten",
        Word(
            template="casts.{casts}",
            example="casts.go.e4m3",
            meaning="operands whose cast differs from the recipe: {0}",
            pattern=r"[a-z0-9_]+\.[a-z0-9]+(?:\+[a-z0-9_]+\.[a-z0-9]+)*",
            dotted=True,
        ),
        unset=(),
    )

    def __post_init__(self) -> None:
        if self.recipe == "bf16":
            for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
                msgspec.structs.force_setattr(self, name, default)
        msgspec.structs.force_setattr(self, "filter_fqns", tuple(sorted(set(self.filter_fqns))))
        msgspec.structs.force_setattr(self, "casts", self._own_casts())

    def _own_casts(self) -> tuple[str, ...]:
        settings = {(cast.partition(":")[0], cast.endswith(("e4m3", "e5m2"))) for cast in set(self.casts)}
        if len(settings) < len(set(self.casts)):
            raise ValueError(f"casts {', '.join(sorted(self.casts))} set an operand twice")
        own = TRAITS[self.recipe]
        return tuple(sorted(cast for cast in set(self.casts) if own.with_casts((cast,)) != own))

    @property
    def enabled(self) -> bool:
        return self.traits.converts

    @property
    def grouped_traits(self) -> RecipeTraits:
        """Return those of grouped matmuls: torchao converts them by the recipe, whatever `casts` says about linears."""
        return TRAITS[self.recipe if self.grouped_mm else "bf16"]

    @property
    def traits(self) -> RecipeTraits:
        return TRAITS[self.recipe].with_casts(self.casts) if self.casts else TRAITS[self.recipe]
