"""`fp8_harness.watch` around the steps of a job that runs already, and `compare` of two of its records."""

import subprocess
import sys

JOB = """
import fp8_harness, torch
from harness.worker.virtual import device
device.install("shared", compiled=False)
from torch import nn
from torchao.float8 import convert_to_float8_training
from harness.plugins.exec.judge import judge_records

def recorded(fault=None):
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)))
    optimizer = torch.optim.AdamW(model.parameters())
    with fp8_harness.watch(model, optimizer) as watched:
        for _ in range(2):
            model(torch.randn(16, 64)).pow(2).mean().backward()
            if fault:
                model[0].weight.grad.fill_(fault)
            optimizer.step()
            optimizer.zero_grad()
    return watched.record

clean, again, broken = recorded(), recorded(), recorded(float("nan"))
print(*(finding.rule for finding in judge_records([clean]).findings), sep=",")
print(*(finding.check for finding in judge_records([broken]).findings), sep=",")
print(len(fp8_harness.compare(clean, again)), len(fp8_harness.compare(clean, broken)))
"""


def test_what_a_running_job_does_is_recorded_judged_and_compared() -> None:
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    clean, broken, compared = done.stdout.splitlines()
    assert clean == "" and "finite" in broken.split(",") and compared == "0 1"
