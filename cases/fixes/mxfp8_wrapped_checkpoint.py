"""Candidate fix for torchao 0.18: a checkpoint of weights that `quantize_` has wrapped for MXFP8 can be loaded.

    fp8-harness run single-mxfp8-wrapper-v2048-s2-resume-b16 --inject cases/fixes/mxfp8_wrapped_checkpoint.py:apply

`torch.load` reads tensors and what is registered as safe, and torchao registers neither the wrapper nor its config.
"""

from __future__ import annotations

import torch
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common import KernelPreference


def apply() -> None:
    """Register in this process what such a checkpoint holds."""
    torch.serialization.add_safe_globals(
        [MXFP8TrainingWeightWrapperTensor, MXFP8TrainingOpConfig, ScaleCalculationMode, KernelPreference]
    )
