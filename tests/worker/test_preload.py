"""What happens before the fork when a target is imported: in a process of its own, which it changes."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from harness.engine.interpreter import child_environ
from harness.sources import module_digest

REPOSITORY = Path(__file__).parents[2]
PRELOAD = """
import os, sys
from harness.worker.main import preload
from harness.worker.state import STATE

called = set()
sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name))
try:
    preload({"target": "mine", "path": sys.argv[1], "source": sys.argv[2]})
except ZeroDivisionError:
    print("raises")
except RuntimeError as error:
    print(str(error).partition(" Fix: ")[0])
sys.setprofile(None)
print("warms up" if "warm_up" in called else "does not warm up", len(os.listdir("/proc/self/task")), "threads")
print(*(f"{change.name} {change.phase}" for change in STATE.changes))
"""

# As on a machine with a GPU: what asks for it, and whether that would make a CUDA context.
ON_A_GPU = """
import torch.cuda

def available():
    asked.append("NVML" if torch.cuda._nvml_based_avail() else "the CUDA runtime")
    return True

asked = []
torch.cuda.is_available = available
torch.cuda._lazy_init = lambda: asked.append("a CUDA context")
torch.cuda.get_device_properties = torch.cuda.get_device_capability = lambda *_: torch.cuda._lazy_init() or (9, 0)
from harness.worker.main import preload

preload({"device": "cuda"})
print(*asked)
"""


def preloaded(folder: Path, text: str, source: str | None = None) -> list[str]:
    """What a process prints that preloads a target with this text, where one of this digest is asked for."""
    (folder / "mine.py").write_text(text)
    return printed(PRELOAD, str(folder), module_digest("mine", [str(folder)]) if source is None else source)


def printed(*words: str) -> list[str]:
    """What a script prints in a process with the environment of a zygote."""
    command = [sys.executable, "-c", *words]
    environment = child_environ({})
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_target_that_cannot_be_imported_raises_before_the_warm_up(tmp_path: Path) -> None:
    assert preloaded(tmp_path, "1 / 0\n") == ["raises", "does not warm up 1 threads", ""]


def test_a_target_that_differs_between_nodes_raises_before_the_warm_up(tmp_path: Path) -> None:
    told, warmed, _ = preloaded(tmp_path, "", source="0" * 16)
    where = f"the source of mine on node {platform.node()}"
    assert told == f"{where} differs from that on the machine that started the run."
    assert warmed == "does not warm up 1 threads"


def test_settings_of_a_target_are_told_and_the_process_can_still_be_forked(tmp_path: Path) -> None:
    text = "import torch\ntorch.set_num_threads(4)\ndef preload(): torch.set_default_dtype(torch.float64)\n"
    assert preloaded(tmp_path, text) == ["warms up 1 threads", "threads import default dtype import"]


def test_on_a_gpu_nothing_makes_a_cuda_context_before_the_fork() -> None:
    assert printed(ON_A_GPU) == ["NVML"], "torchao asks when it is imported"
