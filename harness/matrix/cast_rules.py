"""Which casts of operands are excluded: what torchao refuses, and what is not judged."""

from __future__ import annotations

from harness.matrix.recipes import OPERANDS
from harness.matrix.rule import Exclusion
from harness.matrix.targets import VERSIONS

_TORCHAO = "https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8"
_TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan"

OF_CASTS: tuple[Exclusion, ...] = (
    Exclusion(
        name="casts_of_a_matmul_agree",
        reason="a matmul has two float8 operands or two in high precision: of i and w, go and w_gi, go_gw and i_gw "
        "both are dis or neither is",
        source=f"{_TORCHAO}/config.py",
        axes=("casts", "recipe"),
        when=lambda case: any(
            len({case.float8.traits.scaling[operand] == "dis" for operand in operands}) == 2
            for operands in OPERANDS.values()
            if case.float8.casts
        ),
    ),
    Exclusion(
        name="casts_leave_float8",
        reason="with every operand in high precision it is a bf16 run under another name",
        source=f"{_TORCHAO}/config.py",
        axes=("casts", "recipe"),
        when=lambda case: bool(case.float8.casts) and set(case.float8.traits.scaling.values()) == {"dis"},
    ),
    Exclusion(
        name="rows_have_power_of_two_scales",
        reason="the scales of rows are compared where they are powers of two, as those of the rowwise recipes are",
        source="docs/architecture.md",
        axes=("casts", "recipe"),
        when=lambda case: case.float8.recipe == "tensorwise" and "axs" in case.float8.traits.scaling.values(),
    ),
    Exclusion(
        name="dgrad_before_wgrad",
        reason="the first scaled matmul of backward is taken for dgrad: without it wgrad would be",
        source="docs/architecture.md",
        axes=("casts", "recipe"),
        when=lambda case: case.float8.traits.multiplies("wgrad") and not case.float8.traits.multiplies("dgrad"),
    ),
    Exclusion(
        name="checkpointed_forward_in_float8",
        reason="that checkpointing computes a forward again is told by its casts: without any it is not seen",
        source="docs/architecture.md",
        axes=("casts", "recipe", "checkpointing"),
        when=lambda case: (
            bool(case.float8.casts)
            and case.checkpointing.mode != "none"
            and not case.float8.traits.multiplies("forward")
        ),
    ),
    Exclusion(
        name="casts_are_eager",
        reason="which casts a compiled graph merges and saves is known of the recipes alone",
        source="docs/architecture.md",
        axes=("casts", "recipe", "compile"),
        when=lambda case: bool(case.float8.casts) and case.compile != "none",
    ),
    Exclusion(
        name="casts_outside_of_linears",
        reason="float8 TP styles and the float8 all-gather cast outside of linears, by no config of an operand",
        source=f"{_TORCHAO}/float8_tensor_parallel.py",
        axes=("casts", "recipe", "tp_styles", "fp8_all_gather"),
        when=lambda case: bool(case.float8.casts) and (case.float8.tp_styles == "float8" or case.float8.fp8_all_gather),
    ),
    Exclusion(
        name="torchtitan_casts_by_recipe",
        reason="torchtitan's float8 converter takes the name of a recipe, and no config of an operand",
        source=f"{_TORCHTITAN}/components/quantization/float8.py",
        axes=("target", "casts", "recipe"),
        when=lambda case: case.target in VERSIONS and bool(case.float8.casts),
    ),
)
