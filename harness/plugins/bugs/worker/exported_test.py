"""What a test of `bug export --pytest` has beside the parts of the script that it uses: ranks, and what they assert."""

import datetime
import sys
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harness.plugins.bugs.worker.exported import MESH, Compare, farthest, scattered, stand_in, train

WORLD_SIZE = prod(MESH.values())

pytestmark = pytest.mark.skipif(sys.platform == "win32" or not dist.is_gloo_available(), reason="ranks need gloo")


def run_rank(rank, store, check):
    torch.set_num_threads(1)
    deadline = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=deadline)
    stand_in()
    check()
    dist.destroy_process_group()


def check_gradients():
    name, off, found, expected, limit, rounding = farthest()
    assert off <= limit, (
        f"{name} differs from one rank: relative error {off:.3g}, tolerance {limit:g}, of which rounding explains "
        f"{rounding:g}. Norm {found.norm():.5g}, on one rank {expected.norm():.5g}."
    )


def check_training():
    train(parallel=True)


def check_collectives():
    with Compare():  # raises where with NCCL ranks hang, or get each other's bytes
        train(parallel=True)


def check_rows():
    found, expected, wrong = scattered()
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} rows are more than 0.1 of their norm from a matmul and then a "
        f"reduce-scatter; rounding to bfloat16 explains 0.01. Found {found[..., 0].flatten()[:4].tolist()}, "
        f"expected {expected[..., 0].flatten()[:4].tolist()}."
    )


def test_gradients_are_those_of_one_rank(tmp_path):
    mp.spawn(run_rank, args=(tmp_path / "store", check_gradients), nprocs=WORLD_SIZE)


def test_it_trains(tmp_path):
    mp.spawn(run_rank, args=(tmp_path / "store", check_training), nprocs=WORLD_SIZE)


def test_ranks_call_the_same_collectives(tmp_path):
    mp.spawn(run_rank, args=(tmp_path / "store", check_collectives), nprocs=WORLD_SIZE)


def test_rows_are_scattered_along_the_sequence(tmp_path):
    mp.spawn(run_rank, args=(tmp_path / "store", check_rows), nprocs=WORLD_SIZE)
