"""Save and load the state dict of a model whose weights quantize_ has wrapped for low-precision training."""

import io
import re

import torch
from torch import nn
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.quantization import quantize_


def loaded(config):
    model = nn.Linear(32, 32, dtype=torch.bfloat16)
    quantize_(model, config)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    try:
        return f"{type(torch.load(file)['weight']).__name__}, loaded"
    except Exception as error:
        return re.search(r"Unsupported global: GLOBAL \S+", str(error)).group()


failed = False
for config in (MXFP8TrainingOpConfig(), Float8TrainingOpConfig()):
    name = type(config).__name__.replace("TrainingOpConfig", "TrainingWeightWrapperTensor")
    actual = loaded(config)
    failed |= actual != f"{name}, loaded"
    print("expected:", f"{name}, loaded")
    print("actual:  ", actual)
raise SystemExit(failed)
