"""Machines with GPUs that this one is not: an `nvidia-smi` whose answers a test writes, and a torch beside it."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ONE_H200 = "GPU 0: NVIDIA H200 (UUID: GPU-a0)\n"
CUDA_12 = ("2.13.0+cu129", "cuda: Optional[str] = '12.9'")
CUDA_13 = ("2.13.0+cu130", "cuda: Optional[str] = '13.0'")
ROCM = ("2.13.0+rocm7.1", "cuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'")
CPU = ("2.13.0+cpu", "cuda: Optional[str] = None\nhip: Optional[str] = None")


def put_nvidia_smi(folder: Path, listing: str = ONE_H200, **answers: str) -> str:
    """Write an nvidia-smi to this folder; returns a PATH that begins with it.

    `listing` is what -L prints, `answers` what --query-NAME=… prints; `driver` is for --query-gpu=driver_version, and
    `topo` for that command. It exits with 1 for anything else. It fails where CUDA_VISIBLE_DEVICES is set, as its
    answers may not depend on it.
    """
    program = folder / "nvidia-smi"
    asked = {"-L": listing}
    for name, option in (("driver", "--query-gpu=driver_version"), ("topo", "topo")):
        asked |= {option: answers.pop(name)} if name in answers else {}
    asked |= {f"--query-{name.replace('_', '-')}=*": text for name, text in answers.items()}
    cases = "".join(f"{pattern}) cat <<'END'\n{text}END\n;;\n" for pattern, text in asked.items())
    unset = '[ -z "$CUDA_VISIBLE_DEVICES" ] || exit 9'
    program.write_text(f'#!/bin/sh\n{unset}\ncase "$1" in\n{cases}*) exit 1;;\nesac\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


class Machine(NamedTuple):
    """GPUs, each with a name; `torch`: the version that is installed, and what its version.py says of its build."""

    gpus: tuple[str, ...] = ()
    capability: str = "9.0"
    driver: str = "580.95.05"
    torch: tuple[str, str] = CUDA_13
    peers: str = "OK"
    parts: tuple[str, ...] = ()  # MIG instances of the first GPU

    def pretend(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """Let this process and its children find these GPUs and this build of torch, which cannot be imported."""
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        listing = [f"GPU {index}: {name} (UUID: GPU-{index})" for index, name in enumerate(self.gpus)]
        listing[1:1] = [f"  MIG {part}     Device  {at}: (UUID: MIG-{at})" for at, part in enumerate(self.parts)]
        indices = range(len(self.gpus))
        path = put_nvidia_smi(
            folder,
            "".join(f"{line}\n" for line in listing),
            driver=f"{self.driver}\n" * len(self.gpus),
            gpu="".join(f"{index}, {self.capability}\n" for index in indices),
            topo=self._matrix(),
            compute_apps="",
        )
        patch.setenv("PATH", path if self.gpus else os.environ["PATH"])
        version, build = self.torch
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text("raise RuntimeError('this torch is pretended')\n")
        (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n{build}\n")
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "torch", raising=False)  # which is found before any folder
        patch.setenv("PYTHONPATH", str(folder))

    def _matrix(self) -> str:
        """What `nvidia-smi topo -p2p r` prints: a heading that is underlined, a row for every GPU and a legend."""
        names = [f"GPU{index}" for index in range(len(self.gpus))]
        rows = ["\t".join([name, *("X" if name == other else self.peers for other in names)]) for name in names]
        heading = "\t".join(["", *names])
        return "\n".join(
            [f" \x1b[4m{heading}\x1b[0m", *rows, "", "Legend:", "", "  X    = Self", "  OK   = Status Ok\n"]
        )


H100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA B200"
MACHINES = {
    "none": Machine(torch=CPU),
    "none, torch for CUDA": Machine(),
    "laptop": Machine(("NVIDIA GeForce RTX 3050 Laptop GPU",), "8.6"),
    "1 x H100": Machine((H100,)),
    "8 x H100": Machine((H100,) * 8),
    "2 x 4090": Machine(("NVIDIA GeForce RTX 4090",) * 2, "8.9", peers="CNS"),
    "8 x B200": Machine((B200,) * 8, "10.0"),
    "MIG": Machine((H100,), parts=("3g.40gb", "1g.10gb")),
    "ROCm": Machine(torch=ROCM),
    "old driver": Machine((H100,) * 8, driver="535.104.05"),
    "torch without CUDA": Machine((H100,) * 8, torch=CPU),
    "two kinds": Machine((H100, H100, "NVIDIA L40S")),
}
