"""`fp8-harness exec`: scripts that expect GPUs, unchanged, as subprocesses of the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TRAIN = """
import os, sys, torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

def main():
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    for linear in (model[0], model[2]):
        linear.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = torch.ones(2, device="cuda")
    host = before.cpu()
    before += 1
    loss = model(torch.randn(16, 64, device="cuda")).pow(2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        world = dist.get_world_size(), torch.cuda.device_count()
        print(json_of(dist.get_backend(), *world, host.tolist(), sys.argv[1:]))
    dist.destroy_process_group()

def json_of(*values):
    import json
    return json.dumps(values)

if __name__ == "__main__":
    main()
"""
# Scripts of one process and of two, each run by a fork of one command: what it prints where all is well, or what its
# record says, with its line.
ONE = {
    "missing": ("import torch\nimport not_a_package.sub", "missing.py:2: ModuleNotFoundError: No module named 'not_a"),
    "graph": ("import torch\ntorch.cuda.CUDAGraph()", "graph.py:2: torch.cuda.CUDAGraph needs a GPU. Fix: run without"),
    "own": (
        "from torch.utils.cpp_extension import load_inline\nload_inline('x', cpp_sources='', cuda_sources='k')",
        "own.py:2: torch.utils.cpp_extension.load_inline needs a GPU. Fix: give the script an implementation in torch",
    ),
    "cudart": ("import torch\ntorch.cuda.cudart().cudaProfilerStart()", "cudart.py:2: torch.cuda.cudart needs a GPU."),
    "loads": (
        "import ctypes\nctypes.cdll.LoadLibrary('libcudart.so.12')",
        'loads.py:2: ctypes.CDLL("libcudart.so.12") needs a GPU. Fix: call torch.cuda instead, or catch OSErr',
    ),
    "moved": ("import os\nos.mkdir('sub')\nos.chdir('sub')\nraise OSError('x')", "moved.py:4: OSError: x"),
    "child": (
        "from multiprocessing import Process\ndef f(): raise OSError('y')\np = Process(target=f)\np.start()\np.join()",
        "child.py:2: OSError: y",
    ),
    "interrupt": ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)", "interrupt.py:2: KeyboardInterrupt"),
    "spawn": (
        """
import torch.distributed as dist, torch.multiprocessing as mp, torch
def f(rank, store):
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(2, device=rank))
    assert rank == 0, "one"
if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    mp.spawn(f, args=("file:///proc/self/cwd/spawned",), nprocs=2)
""",
        "spawn.py:6: AssertionError: one",
    ),
    "streams": (
        """
import torch
from torch.profiler import ProfilerActivity, profile
stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
with torch.cuda.stream(stream), torch.cuda.device(0), profile(activities=[*ProfilerActivity.__members__.values()][:2]):
    assert torch.cuda.current_stream() == stream
    start.record()
    made = torch.ones(4, device="cuda").pin_memory() * 2
    end.record()
made.record_stream(stream)
torch.cuda.current_stream().wait_stream(stream)
assert start.elapsed_time(end) >= 0 and torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
torch.cuda.memory._record_memory_history()
torch.cuda.memory_summary(), torch.cuda.nccl.version(), torch.cuda.mem_get_info()
torch.backends.cuda.matmul.allow_tf32 = True
print("streams: well")
""",
        "",
    ),
    "places": (
        """
import io, torch, threading
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
gpu, host = torch.device("cuda", 0), torch.ones(2)
there = host.cuda()
there += 1
assert host.tolist() == [1, 1] and not host.is_cuda and there.device == gpu and there.cuda() is there
back = there.to("cpu")
there += 1
assert back.tolist() == [2, 2] and back.is_cpu and back.cpu() is back and back.get_device() == -1
model = nn.Linear(2, 2).to(gpu)
loss = model(torch.randn(3, 2).to(gpu)).sum()
loss.backward()
assert loss.is_cuda and model.weight.grad.device == next(model.parameters()).device == gpu
assert torch.zeros(2, device=loss.device).is_cuda and not torch.cat([host, back]).is_cuda
assert torch.compile(lambda x: x.sin() + len(x.device.type))(there).is_cuda
saved = io.BytesIO()
torch.save(model.state_dict(), saved)
for place in ("cpu", "cuda:0"):
    saved.seek(0)
    assert torch.load(saved, map_location=place)["bias"].device == torch.device(place)
made = []
thread = threading.Thread(target=lambda: made.append(torch.zeros(2, device="cuda")))
thread.start()
thread.join()
assert made[0].is_cuda
for context in (None, "spawn"):
    loader = DataLoader(TensorDataset(host), num_workers=1, pin_memory=True, multiprocessing_context=context)
    assert sum(one.cuda() for (one,) in loader).is_cuda
print("places: well")
""",
        "",
    ),
}
RANKS = {
    "raises": ("if rank: raise ValueError(rank)", "raises.py:4: ValueError: 1"),
    "leaves": ("sys.exit(7) if rank else None", "leaves.py:4: sys.exit(7)"),
    "dies": ("os._exit(9) if rank else None", "dies.py:4: os._exit(9)"),
    "ends": ("sys.exit(0) if rank else None", "group rank 1 has ended: a GPU would wait for it"),
    "receives": (
        "dist.barrier()\ndist.irecv(torch.ones(2, device='cuda'), 1).wait() if not rank else sys.exit()",
        "receives.py:5: CollectiveMismatch: group rank 0 receives a message, and group rank 1 has ended: a GPU would",
    ),
    "sends": (
        "dist.barrier()\nrank and sys.exit()\nfor _ in range(99):\n    dist.send(torch.ones(2, device='cuda'), 1)",
        "sends.py:7: CollectiveMismatch: group rank 0 sends a message, and group rank 1 has ended: a GPU would wait",
    ),
    "killed": ("os.kill(os.getpid(), 9) if rank else None", "SIGKILL ended it"),
    "crashes": ("import ctypes; ctypes.string_at(0) if rank else None", "crashes.py:4: SIGSEGV ended it"),
    "stays": ("signal.signal(15, signal.SIG_IGN) if not rank else sys.exit(3)", "stays.py:4: sys.exit(3)"),
    "saves": (
        """
from torch.distributed.checkpoint import async_save, load, save
from torch.distributed.fsdp import fully_shard
model = fully_shard(torch.nn.Linear(8, 8).cuda())
state = {name: value.clone() for name, value in model.state_dict().items()}
for way in (save, lambda *a, **b: async_save(*a, **b).result()):
    way(state, checkpoint_id="saved" + way.__name__[:1])
    model.weight.to_local().zero_()
    load(model.state_dict(), checkpoint_id="saved" + way.__name__[:1])
    assert model.weight.full_tensor().equal(state["weight"].full_tensor())
print("saves: well", flush=True)
""".replace("    model.weight.to", "    with torch.no_grad():\n        model.weight.to"),
        "",
    ),
}
BEGIN = """import os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
rank = dist.get_rank()
"""
ALL = """
import os, runpy, sys
from torch.distributed.run import main
for name in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        ranks = name.startswith("ranks/")
        main(["--nproc-per-node", "2", name]) if ranks else runpy.run_path(name, run_name="__main__")
        sys.exit()
    os.waitpid(pid, 0)
"""


def run(folder: Path, text: str, *options: str, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    words = [sys.executable, "-m", "harness", "exec", *options, "--", *command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_a_float8_script_of_torchrun_trains_as_on_two_gpus(tmp_path: Path) -> None:
    command = ("torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1")
    done = run(tmp_path, TRAIN, "--json", "answer.json", command=command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["nccl", 2, 2, [1.0, 1.0], ["--lr", "1"]]
    answer = json.loads((tmp_path / "answer.json").read_text())
    absent = {absent["name"]: (absent["line"], absent["calls"]) for absent in answer["absent"]}
    assert answer["ranks"] == 2 and absent["torch.cuda.synchronize"] == ("train.py:25", 2)


class Done(NamedTuple):
    """What the scripts printed, and what the answer says of each process."""

    output: str
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Run all scripts by one command: a process each, as a script starts others by itself."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "ranks").mkdir()
    for name, (text, _) in ONE.items():
        (folder / f"{name}.py").write_text(text)
    for name, (text, _) in RANKS.items():
        (folder / "ranks" / f"{name}.py").write_text(f'{BEGIN}{text}\ndist.all_reduce(torch.ones(2, device="cuda"))\n')
    files = [*(f"{name}.py" for name in ONE), *(f"ranks/{name}.py" for name in RANKS)]
    ran = run(folder, ALL, "--json", "answer.json", "--gpu", "b200", command=("python", "train.py", *files))
    assert ran.returncode == 0, ran.stderr
    return Done(ran.stdout + ran.stderr, json.loads((folder / "answer.json").read_text()))


@pytest.mark.parametrize("name", [*ONE, *RANKS])
def test_a_script_ends_as_on_gpus_or_says_at_which_line_it_cannot(done: Done, name: str) -> None:
    told = (ONE | RANKS)[name][1]
    said = [record["ended"] for record in done.answer["records"] if f"{name}.py" in record["ended"]]
    if not told:
        assert f"{name}: well" in done.output, said
    else:
        assert any(told in record["ended"] for record in done.answer["records"]), said


def test_no_traceback_shows_what_stands_for_a_gpu(done: Done) -> None:
    assert "graph.py" in done.output
    assert "worker/gpu.py" not in done.output and "worker/places.py" not in done.output


@pytest.mark.parametrize(
    ("option", "text", "told"),
    [
        pytest.param(
            "--timeout=15",
            "import time\nwhile dist.get_rank():\n    time.sleep(0.1)",
            "rank 0 at train.py:7 in all_reduce; ",
            marks=pytest.mark.sweep,  # it waits that long
        ),
        (
            "--memory-per-rank=0.8",
            "import time\nheld = [torch.ones(1 << 29) for _ in range(dist.get_rank())]\ntime.sleep(99 * len(held))",
            "rank 1 held ",
        ),
    ],
)
def test_a_bound_ends_a_command_and_says_where_each_rank_was(tmp_path: Path, option: str, text: str, told: str) -> None:
    text = f'{BEGIN}{text}\ndist.all_reduce(torch.ones(2, device="cuda"))\n'
    ended = run(tmp_path, text, option, command=("torchrun", "--nproc-per-node", "2", "train.py"))
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and "exec: error: ended: " in last and told in last and "rank 1 at train.py" in last


def test_output_input_arguments_and_exit_code_are_those_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "other.py").write_text("VALUE = 3")
    (tmp_path / "pkg" / "train.py").write_text(
        "import argparse, os, sys, torch, torch.distributed as dist\nfrom .other import VALUE\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\nlr = parser.parse_args().lr\n"
        "dist.init_process_group('nccl')\nrank = dist.get_rank()\nif rank == 0:\n"
        "    print(input('name? '), lr, VALUE, os.environ['WORLD_SIZE'], torch.cuda.device_count(), file=sys.stdout)\n"
        "print('x' * 99 + '\\n', file=sys.stderr, end='')\n"
    )
    words = ("torchrun", "--nnodes", "2", "--nproc-per-node", "2", "-m", "pkg.train", "--lr", "1")
    command = [sys.executable, "-m", "harness", "exec", "-n", "4", "--nodes", "2", "--", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, input="me\n")
    assert ended.stdout == "name? me 1.0 3 4 2\n" and ended.returncode == 0, ended.stderr
    assert ended.stderr.count("x" * 99 + "\n") == 4 and "exec: 4 ranks" in ended.stderr


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("torchrun", "--nproc-per-node", "900", "train.py"), "900 ranks need "),
        (("torchrun", "--nproc-per-node", "2", "gone.py"), "gone.py: there is no such script"),
        (("python", "-m", "no_such_module"), "no_such_module: there is no such module."),
    ],
)
def test_what_the_launcher_cannot_start_is_bad_input(tmp_path: Path, command: tuple[str, ...], told: str) -> None:
    done = run(tmp_path, "", command=command)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and told in last and "Fix: " in last


@pytest.mark.parametrize("command", [("python", "gone.py"), ("no-such-program",), ("ls",)])
def test_a_command_that_cannot_run_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = run(tmp_path, "", command=command)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "Fix: " in done.stderr
