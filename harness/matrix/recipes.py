"""What each FP8 recipe does: rules and expectations use these properties instead of comparing recipe names.

Sources, all of torchao 0.18: `Float8LinearConfig.from_recipe_name` and `Float8Linear`; `mx_mm` of
`prototype/moe_training/mxfp8_linear.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

Recipe = Literal["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_floor", "mxfp8_with_gw_hp"]

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOAT8_MAX = {E4M3: 448.0, E5M2: 57344.0}  # the largest finite value
ITEM_BYTES = {E4M3: 1, E5M2: 1, "uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}


# The operands of matmuls in torchao's words: those of `output`, and of `grad_input` (gi) and `grad_weight` (gw).
Operand = Literal["i", "i_gw", "w", "w_gi", "go", "go_gw"]
# One scale for the tensor, one along its contracted dim, one for each 32 values along it, or high precision.
Scaling = Literal["ten", "axs", "blk", "dis"]
BLOCK = 32  # values along the contracted dim that share a scale in MXFP8
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
_DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


class RecipeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one recipe, or of one with other casts. `scaling`: of every operand; empty without float8."""

    scaling: Mapping[Operand, Scaling] = {}
    power_of_two_scales: bool = False
    rounds_scales_down: bool = False  # of a block: the power of two below amax / 256, so values above 448 saturate
    grad_output_dtype: str = E4M3
    gathers_weights_in_float8: bool = False  # supports FSDP2's float8 all-gather
    has_tp_styles: bool = False  # supports Float8ColwiseParallel and the other float8 TP styles

    @property
    def converts(self) -> bool:
        return bool(self.scaling)

    def multiplies(self, matmul: MatmulRole) -> bool:
        """True when this matmul of a converted linear has float8 operands; otherwise it stays in high precision."""
        return any(self.scaling.get(operand, "dis") != "dis" for operand in OPERANDS[matmul])

    def scales_rows(self, matmul: MatmulRole) -> bool:
        return any(self.scaling.get(operand) == "axs" for operand in OPERANDS[matmul])

    @property
    def one_scale_per_tensor(self) -> bool:
        """True when every cast has one scale; otherwise some have one for every row that a matmul contracts."""
        return self.converts and set(self.scaling.values()) <= {"ten", "dis"}

    @property
    def in_blocks(self) -> bool:
        """True for MXFP8: 32 values along the contracted dim share a scale."""
        return "blk" in self.scaling.values()

    @property
    def scale_dtype(self) -> str:
        return "float8_e8m0fnu" if self.in_blocks else "float32"

    @property
    def multiple(self) -> int:
        """What every dimension of a scaled matmul must be a multiple of."""
        return BLOCK if self.in_blocks else 16

    @property
    def group_multiple(self) -> int:
        """What the tokens of an expert are padded to a multiple of: the tile of the grouped matmul, or of its casts."""
        return 128 if self.in_blocks else 16

    @property
    def one_scale_per_weight_in_dgrad(self) -> bool:
        return self.scaling.get("w_gi") == "ten"

    @property
    def writes_bfloat16(self) -> bool:
        """True when matmuls write bfloat16 whatever the dtype of activations: those that scale rows or blocks do."""
        return bool({"axs", "blk"} & set(self.scaling.values()))

    def with_casts(self, casts: Iterable[str]) -> RecipeTraits:
        """These traits with other casts of some operands, each `OPERAND:SETTING`."""
        scaling, dtype = dict(self.scaling), self.grad_output_dtype
        for cast in casts:
            operand, _, setting = cast.partition(":")
            if setting in _DTYPES:
                dtype = _DTYPES[setting]
            else:
                scaling[msgspec.convert(operand, Operand)] = msgspec.convert(setting, Scaling)
        return msgspec.structs.replace(self, scaling=scaling, grad_output_dtype=dtype)


def _scaled(scaling: Scaling, **others: Scaling) -> dict[Operand, Scaling]:
    operands: tuple[Operand, ...] = get_args(Operand)
    return {operand: others.get(operand, scaling) for operand in operands}


TRAITS: dict[Recipe, RecipeTraits] = {
    "bf16": RecipeTraits(),
    "tensorwise": RecipeTraits(
        scaling=_scaled("ten"), grad_output_dtype=E5M2, gathers_weights_in_float8=True, has_tp_styles=True
    ),
    "rowwise": RecipeTraits(scaling=_scaled("axs"), power_of_two_scales=True),
    "rowwise_with_gw_hp": RecipeTraits(
        scaling=_scaled("axs", w_gi="ten", i_gw="dis", go_gw="dis"), power_of_two_scales=True
    ),
    "mxfp8": RecipeTraits(scaling=_scaled("blk"), power_of_two_scales=True),
    "mxfp8_floor": RecipeTraits(scaling=_scaled("blk"), power_of_two_scales=True, rounds_scales_down=True),
    "mxfp8_with_gw_hp": RecipeTraits(scaling=_scaled("blk", i_gw="dis", go_gw="dis"), power_of_two_scales=True),
}


def block_recipe(*, rounds_scales_down: bool, wgrad: bool) -> Recipe | None:
    """The recipe of MXFP8 with this rounding of scales, whose weight gradients are in MXFP8 or in high precision."""
    wanted = (rounds_scales_down, wgrad)
    recipes = (
        recipe
        for recipe, traits in TRAITS.items()
        if traits.in_blocks and (traits.rounds_scales_down, traits.multiplies("wgrad")) == wanted
    )
    return next(recipes, None)
