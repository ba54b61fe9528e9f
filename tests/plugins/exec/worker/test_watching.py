"""`fp8_harness.watch` around the steps of a job that runs already, and `compare` of two of its records."""

import subprocess
import sys
from pathlib import Path

RECORDED = """
import fp8_harness, sys, torch
import torch.distributed as dist
from harness.plugins.exec.judge import judge_records
from harness.worker.virtual import device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import convert_to_float8_training

def recorded(fault=1.0):
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    with fp8_harness.watch(model, optimizer) as watched:
        for _ in range(2):
            model(torch.randn(16, 64)).pow(2).mean().backward()
            model[0].weight.grad.mul_(fault)
            optimizer.step()
            optimizer.zero_grad()
    return watched.record
"""
ALONE = """
device.install("shared", compiled=False)
clean, again, broken = recorded(), recorded(), recorded(float("nan"))
print(*(finding.rule for finding in judge_records([clean]).findings), sep=",")
print(*(finding.check for finding in judge_records([broken]).findings), sep=",")
print(len(fp8_harness.compare(clean, again)), len(fp8_harness.compare(clean, broken)))
"""
ACCUMULATED = """
device.install("shared", compiled=False)

def found(way):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    with fp8_harness.watch(model, optimizer) as watched:
        for step in range(3):
            kept, batches = [], [torch.randn(16, 64) for _ in range(2)]
            for batch in batches:
                if way == "cleared" or (way == "skips" and step == 1) or way in ("sums", "same"):
                    optimizer.zero_grad()
                model(batches[0] if way == "same" else batch).pow(2).mean().backward()
                kept.append([param.grad.clone() for param in model.parameters()])
            for param, grads in zip(model.parameters(), zip(*kept)) if way == "sums" else ():
                param.grad.copy_(sum(grads))
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    rules = [finding.rule for finding in judge_records([watched.record]).findings]
    return [rule for rule in rules if rule != "leaks/grows"]  # this script keeps gradients

for way in ("cleared", "well", "skips", "sums", "same"):
    print(*found(way))
"""
ON_RANKS = """
def main(rank, folder):
    device.install("gloo", compiled=False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    clean, again, broken = recorded(), recorded(), recorded(1 + rank)
    found = [len(fp8_harness.compare(clean, other, allowed=1e-3)) for other in (clean, again, broken)]
    with open(f"{folder}/rank{rank}", "w") as file:
        print(clean.rank, clean.world_size, *found, file=file)
    dist.destroy_process_group()

torch.multiprocessing.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def ran(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", RECORDED + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_running_job_does_is_recorded_judged_and_compared() -> None:
    clean, broken, compared = ran(ALONE).splitlines()
    assert clean == "" and "finite" in broken.split(",") and compared == "0 1"


def test_gradients_cleared_between_microbatches_are_found_and_not_where_that_is_meant() -> None:
    assert ran(ACCUMULATED).splitlines() == ["watch/gradients-cleared", "", "", "", ""]


def test_ranks_over_gloo_are_recorded_each_and_the_one_that_differs_is_found(tmp_path: Path) -> None:
    ran(ON_RANKS, str(tmp_path))
    first, second = ((tmp_path / f"rank{rank}").read_text().split() for rank in (0, 1))
    assert (first, second) == (["0", "2", "0", "0", "0"], ["1", "2", "0", "0", "1"])
