"""Tells a crash: the run raises the reported error."""

from __future__ import annotations

import re
import sys

import torch.distributed as dist

from harness.worker.exported.given import ERROR
from harness.worker.exported.llama import gradients, prepare


def main():
    prepare()
    try:
        gradients(parallel=True)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = ""
    same = bool(found) and re.search(ERROR, found) is not None
    told = "FAULT: it raises" if same else "cannot tell: another error" if found else "fixed: it runs"
    sys.stdout.write(
        f"rank {dist.get_rank()}: {told}\n"
        f"  expected  no error; as reported: {ERROR}\n  found     {found or 'no error'}\n"
    )
    return 1 if same else 2 if found else 0
