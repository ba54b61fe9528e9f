"""`fp8-harness exec`: scripts that expect GPUs, unchanged, as subprocesses of the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
ALONE = "Fix: let all ranks end alike, or raise what is wrong: the others were ended."
EARLY = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 1:
    sys.exit(7)
dist.all_reduce(torch.ones(2, device="cuda"))
"""
ONE = """
import io, threading, torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

class Item:
    pass

def child(rank, item):
    print(rank, type(item).__name__, torch.ones(1, device="cuda").item(), flush=True)

if __name__ == "__main__":
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(2, device="cuda")))
    thread.start()
    thread.join()
    batches = list(DataLoader(list(range(4)), batch_size=2, num_workers=1, pin_memory=True))
    mp.spawn(child, args=(Item(),), nprocs=1)
    saved = io.BytesIO()
    torch.save(made, saved)
    saved.seek(0)
    print(len(torch.load(saved, map_location="cuda:0")), len(batches), torch.cuda.get_device_capability(), flush=True)
    torch.cuda.CUDAGraph()
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


def test_a_rank_that_leaves_is_named_with_its_line_and_ends_the_others(tmp_path: Path) -> None:
    done = run(tmp_path, EARLY, command=("torchrun", "--nproc-per-node", "2", "train.py"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "exec: error: rank 1: train.py:5: sys.exit(7) " + ALONE


def test_threads_workers_and_spawned_processes_have_the_gpu_and_what_it_lacks_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, ONE, "--gpu", "b200", command=("python", "train.py"))
    assert done.stdout.splitlines() == ["0 Item 1.0", "1 2 (10, 0)"]
    said = "exec: error: train.py:23: torch.cuda.CUDAGraph needs a GPU. Fix: run without CUDA graphs here"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == said


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
