"""The conversion of a case to float8: the recipe and its options."""

import functools
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from harness.matrix.axis import Changes, Word, axis, flag
from harness.matrix.model import CaseStruct
from harness.matrix.recipes import TRAITS, Recipe, RecipeTraits

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

    recipe: Annotated[
        Recipe,
        _axis(
            "how linears are converted to FP8; bf16 converts none",
            flag("bf16", "no FP8: no linear is converted", recipe="bf16"),
            flag("tensorwise", "FP8 with one scale per tensor", recipe="tensorwise"),
            flag("rowwise", "FP8 with one scale per row", recipe="rowwise"),
            flag("rowwise_with_gw_hp", "rowwise, but no FP8 in weight gradients", recipe="rowwise_with_gw_hp"),
            flag("mxfp8", "MXFP8: one scale per 32 values, rounded up (RCEIL)", recipe="mxfp8"),
            flag("mxfp8_floor", "MXFP8 whose scales are rounded down (FLOOR)", recipe="mxfp8_floor"),
            flag("mxfp8_with_gw_hp", "MXFP8, but high precision in weight gradients", recipe="mxfp8_with_gw_hp"),
            part="recipe",
            needs=(),
            simplest="tensorwise",
            everyday=True,
        ),
    ] = "bf16"
    fp8_all_gather: Annotated[
        bool,
        _axis(
            "FSDP2 gathers weights in float8",
            flag("ag.fp8", "FSDP2 gathers weights in float8", fp8_all_gather=True),
            flag("ag.fp8pre", "ag.fp8 with precomputed weight scales", fp8_all_gather=True, precompute_scale=True),
            same_bits="the gathered shards carry the scale of the full weight, so it does not matter where they are "
            "cast",
        ),
    ] = False
    precompute_scale: Annotated[
        bool,
        _axis(
            "compute the scales of all gathered weights at once",
            flag("ag.pre", "precomputed weight scales without ag.fp8: excluded", precompute_scale=True),
            same_bits="the amax of a weight is the same right after its update and right before its use; in the first "
            "step no scale is precomputed",
        ),
    ] = False
    conversion: Annotated[
        Literal["module", "wrapper"],
        _axis(
            "MXFP8 by replaced modules, or by wrapped weights",
            flag("wrapper", "MXFP8 by weights that quantize_ wraps, in linears of torch", conversion="wrapper"),
            changes=Changes.NOTHING,
            same_bits="a wrapped weight multiplies by the function that the replaced module calls",
        ),
    ] = "module"
    convert_after_tp: Annotated[
        bool,
        _axis(
            "convert to MXFP8 after tensor parallelism is applied",
            flag("aftertp", "converted after tensor parallelism is applied", convert_after_tp=True),
            changes=Changes.NOTHING,
            same_bits="the same linears multiply the same distributed weights",
        ),
    ] = False
    tp_styles: Annotated[
        Literal["plain", "float8"],
        _axis(
            "float8: TP gathers activations in float8",
            flag("tpstyle.fp8", "TP gathers activations in float8 (Float8ColwiseParallel)", tp_styles="float8"),
            changes=Changes.NOTHING,
            same_bits="a cast with the scale of the logical tensor is the same before and after an all-gather",
        ),
    ] = "plain"
    grouped_mm: Annotated[
        bool,
        _axis(
            "convert the grouped matmuls of experts too",
            flag("gmm.fp8", "the grouped matmuls of experts are converted too", grouped_mm=True),
            needs=("recipe", "experts"),
            exported=False,
        ),
    ] = False
    output_layer: Annotated[
        bool,
        _axis("convert the output layer too", flag("head.fp8", "the output layer is converted too", output_layer=True)),
    ] = False
    pad_inner_dim: Annotated[
        bool,
        _axis(
            "pad inner dimensions of matmuls to multiples of 16",
            flag("pad", "inner dimensions are padded to multiples of 16", pad_inner_dim=True),
            same_bits="where every matmul is aligned there is nothing to pad",
        ),
    ] = False
    filter_fqns: Annotated[
        tuple[Name, ...],
        _axis(
            "do not convert linears whose name contains one of these",
            Word(
                template="filter.{filter_fqns}",
                example="filter.wk+wq",
                meaning="linears with one of {0} in their names are not converted",
                pattern=r"[a-z0-9_.+]+",
            ),
        ),
    ] = ()
    casts: Annotated[
        tuple[CastName, ...],
        _axis(
            "operands whose cast differs from the recipe: go:e4m3, i_gw:dis, w_gi:ten",
            Word(
                template="casts.{casts}",
                example="casts.go.e4m3",
                meaning="operands whose cast differs from the recipe: {0}",
                pattern=r"[a-z0-9_]+\.[a-z0-9]+(?:\+[a-z0-9_]+\.[a-z0-9]+)*",
                dotted=True,
            ),
            exported=False,
        ),
    ] = ()

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
        """Those of grouped matmuls: torchao converts them by the recipe, whatever `casts` says about linears."""
        return TRAITS[self.recipe if self.grouped_mm else "bf16"]

    @property
    def traits(self) -> RecipeTraits:
        return TRAITS[self.recipe].with_casts(self.casts) if self.casts else TRAITS[self.recipe]
