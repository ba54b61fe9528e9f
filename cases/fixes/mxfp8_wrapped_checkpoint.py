"""Candidate fix for torchao 0.18: a checkpoint of weights that `quantize_` has wrapped for training can be loaded.

    fp8-harness run single-mxfp8-wrapper-v2048-s2-resume-b16 --inject cases/fixes/mxfp8_wrapped_checkpoint.py:apply

`torch.load` reads tensors and what is registered as safe, and torchao registers neither the wrapper nor its config.
"""

from __future__ import annotations

import torch
from torchao.float8 import CastConfig, Float8GemmConfig, Float8LinearConfig
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor, MXFP8TrainingWeightWrapperTensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common import KernelPreference

_OF_MXFP8 = (MXFP8TrainingWeightWrapperTensor, MXFP8TrainingOpConfig, ScaleCalculationMode, KernelPreference)
_OF_FLOAT8 = (
    Float8TrainingWeightWrapperTensor,
    Float8TrainingOpConfig,
    Float8LinearConfig,
    CastConfig,
    Float8GemmConfig,
    ScalingGranularity,
    ScalingType,
    LinearMMConfig,
    ScaledMMConfig,
)


def apply() -> None:
    """Register in this process what such a checkpoint holds."""
    torch.serialization.add_safe_globals([*_OF_MXFP8, *_OF_FLOAT8])
