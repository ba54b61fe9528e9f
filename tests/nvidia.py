"""A machine with GPUs that it does not have: an `nvidia-smi` whose answers a test writes."""

from __future__ import annotations

import os
from pathlib import Path

ONE_H200 = "GPU 0: NVIDIA H200 (UUID: GPU-a0)\n"


def put_nvidia_smi(folder: Path, listing: str = ONE_H200, **answers: str) -> str:
    """Write an nvidia-smi to this folder; returns a PATH that begins with it.

    `listing` is what -L prints, `answers` what --query-NAME=… prints; it exits with 1 for anything else. It fails where
    CUDA_VISIBLE_DEVICES is set, as its answers may not depend on it.
    """
    program = folder / "nvidia-smi"
    asked = {"-L": listing} | {f"--query-{name.replace('_', '-')}=*": text for name, text in answers.items()}
    cases = "".join(f"{pattern}) cat <<'END'\n{text}END\n;;\n" for pattern, text in asked.items())
    unset = '[ -z "$CUDA_VISIBLE_DEVICES" ] || exit 9'
    program.write_text(f'#!/bin/sh\n{unset}\ncase "$1" in\n{cases}*) exit 1;;\nesac\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
