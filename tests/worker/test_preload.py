"""What happens before the fork when a target is imported: in a process of its own, which it changes."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from harness.engine.processes import child_environ
from harness.sources import module_digest

REPOSITORY = Path(__file__).parents[2]
# Each target in a fork of a process that has imported everything else.
PRELOAD = """
import os, sys
from harness.worker.main import preload
from harness.worker.process.process import PROCESS

def try_target(name, source):
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name))
    try:
        preload({"target": name, "path": sys.argv[1], "source": source})
    except ZeroDivisionError:
        print("raises")
    except RuntimeError as error:
        print(str(error).partition(" Fix: ")[0])
    sys.setprofile(None)
    print("warms up" if "warm_up" in called else "does not warm up", len(os.listdir("/proc/self/task")), "threads")
    print(*(f"{change.name} {change.phase}" for change in PROCESS.settings.changes), flush=True)

preload({})
print(os.environ["CUDA_VISIBLE_DEVICES"] or "no GPU", sys.modules["torch"].cuda._parse_visible_devices())
print(*(name for name in ("torch._dynamo", "torch._inductor.codegen.triton") if name in sys.modules), flush=True)
for words in sys.argv[2:]:
    if os.fork():
        assert os.wait()[1] == 0
    else:
        try_target(*words.split())
        os._exit(0)
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


def printed(*words: str) -> list[str]:
    """What a script prints in a process with the environment of a fork server."""
    command = [sys.executable, "-c", *words]
    environment = child_environ({})
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TARGETS = {
    "raising": "1 / 0\n",
    "other": "",
    "setting": "import torch\ntorch.set_num_threads(4)\ndef preload(): torch.set_default_dtype(torch.float64)\n",
}


def test_a_target_raises_before_the_warm_up_or_is_told_and_the_process_can_be_forked(tmp_path: Path) -> None:
    for name, text in TARGETS.items():
        (tmp_path / f"{name}.py").write_text(text)
    digests = {name: module_digest(name, [str(tmp_path)]) for name in TARGETS} | {"other": "0" * 16}
    seen, imported, *lines = printed(PRELOAD, str(tmp_path), *(f"{name} {digest}" for name, digest in digests.items()))
    assert seen == "no GPU []", "torchao takes other paths where it sees one"
    assert imported == "torch._dynamo", "torchao imports inductor to change what it writes for GPUs"
    assert lines[:3] == ["raises", "does not warm up 1 threads", ""]
    where = f"the source of other on node {platform.node()}"
    differs = f"{where} differs from that on the machine that started the run."
    assert lines[3:6] == [differs, "does not warm up 1 threads", ""]
    assert lines[6:] == ["warms up 1 threads", "threads import default dtype import"]


def test_on_a_gpu_nothing_makes_a_cuda_context_before_the_fork() -> None:
    assert printed(ON_A_GPU) == ["NVML"], "torchao asks when it is imported"
