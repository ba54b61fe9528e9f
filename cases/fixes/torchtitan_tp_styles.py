"""Candidate fix for torchtitan 0.2.2: tensorwise float8 with TP never gets the float8 TP styles.

    fp8-harness run torchtitan --select 'tp_styles=float8' --inject cases/fixes/torchtitan_tp_styles.py:apply

`parallelize_llama` looks for a converter named "float8", but the converter is registered as "quantize.linear.float8".
"""

from __future__ import annotations

import importlib
from typing import Any


def apply() -> None:
    """Patch torchtitan in this process: its TP plan gets the float8 styles that it has."""
    parallelize: Any = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    stock = parallelize.apply_tp

    def with_float8_styles(*args: Any, **options: Any) -> Any:
        return stock(*args, **(options | {"enable_float8_tensorwise_tp": True}))

    parallelize.apply_tp = with_float8_styles
