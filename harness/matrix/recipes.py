"""What each FP8 recipe does: rules and expectations use these properties instead of comparing recipe names.

Source: `Float8LinearConfig.from_recipe_name` and `Float8Linear` of torchao 0.18.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Recipe = Literal["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOAT8_MAX = {E4M3: 448.0, E5M2: 57344.0}  # the largest finite value
ITEM_BYTES = {E4M3: 1, E5M2: 1, "uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}


class RecipeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one recipe."""

    converts: bool = True
    one_scale_per_tensor: bool = False  # otherwise one for every row or column that a matmul contracts
    one_scale_per_weight_in_dgrad: bool = False
    power_of_two_scales: bool = False
    float8_weight_gradient: bool = False  # otherwise wgrad stays in high precision
    grad_output_dtype: str = E4M3
    writes_bfloat16: bool = False  # its matmuls write bfloat16 whatever the dtype of activations
    scales_gradients_afterwards: bool = False  # dgrad and wgrad multiply without scales and divide the result
    gathers_weights_in_float8: bool = False  # supports FSDP2's float8 all-gather
    has_tp_styles: bool = False  # supports Float8ColwiseParallel and the other float8 TP styles


TRAITS: dict[Recipe, RecipeTraits] = {
    "bf16": RecipeTraits(converts=False),
    "tensorwise": RecipeTraits(
        one_scale_per_tensor=True,
        one_scale_per_weight_in_dgrad=True,
        float8_weight_gradient=True,
        grad_output_dtype=E5M2,
        gathers_weights_in_float8=True,
        has_tp_styles=True,
    ),
    "rowwise": RecipeTraits(
        power_of_two_scales=True,
        float8_weight_gradient=True,
        writes_bfloat16=True,
        scales_gradients_afterwards=True,
    ),
    "rowwise_with_gw_hp": RecipeTraits(
        one_scale_per_weight_in_dgrad=True,
        power_of_two_scales=True,
        writes_bfloat16=True,
        scales_gradients_afterwards=True,
    ),
}
