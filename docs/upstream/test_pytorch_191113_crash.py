"""A compiled block crashes in backward of an input that is still being gathered.

Float8 tensorwise, TP, torch.compile. It must train. It fails with torch 2.13.0+cpu and torchao 0.18.0,
https://github.com/pytorch/pytorch/pull/191113.
"""

import datetime
import sys

import pytest

pytest.importorskip("torch", minversion="2.11")
pytest.importorskip("torchao", minversion="0.17")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

NOT_CONVERTED = ("output",)  # ends of the names of linears
VOCAB = 64
DIM = 32
BATCH = 1  # sequences of a data-parallel rank
TOKENS = 32
DEVICE = "cpu"
REPLICAS = 1  # data-parallel ranks
WORLD_SIZE = 2
pytestmark = pytest.mark.skipif(sys.platform == "win32" or not dist.is_gloo_available(), reason="ranks need gloo")


class Block(nn.Module):
    """Of a Llama, without rotary embedding; its linears are side by side."""

    def __init__(self):
        super().__init__()
        self.ffn_norm = nn.RMSNorm(DIM)
        self.w1, self.w3 = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def build(tp):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.embedding = nn.Embedding(VOCAB, DIM)
    model.layers = nn.Sequential(Block())
    model.norm = nn.RMSNorm(DIM)
    model.output = nn.Linear(DIM, VOCAB, bias=False)
    model.to(DEVICE, torch.float32)
    for weight in model.parameters():  # larger from row to row, so that no two shards have the same amax
        weight.data.mul_(torch.linspace(1, 2, weight.numel(), device=DEVICE).view_as(weight))
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, n: not n.endswith(NOT_CONVERTED))
    if tp is not None:
        parallelize_module(model, tp, tp_plan())
    for name, block in model.layers.named_children():
        setattr(model.layers, name, torch.compile(block, backend="aot_eager", fullgraph=True))
    return model


def tp_plan():
    stream = Shard(1)
    colwise, rowwise = ColwiseParallel, RowwiseParallel
    plan = {f"layers.*.{name}": colwise(input_layouts=stream) for name in ("w1", "w3")}
    plan["layers.*.w2"] = rowwise(output_layouts=stream)
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    plan["output"] = ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    plan |= {name: SequenceParallel() for name in ("norm", "layers.*.ffn_norm")}
    return plan


def train():
    """In the layout that fails; or on one rank that gets the batches of all ranks one after the other."""
    tokens = torch.randint(VOCAB, (1, REPLICAS, BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    tp = None
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    tp = mesh["tp"]
    model = build(tp)
    for batches in tokens.to(DEVICE):
        for batch in batches:
            logits = model(batch).float().flatten(0, 1)
            (F.cross_entropy(logits, batch.roll(-1, 1).flatten()) / len(batches)).backward()
    return model


def stand_in():
    """What a CPU lacks."""
    torch.library.impl("aten::_scaled_mm", "cpu", scaled_mm)  # with the rules of a GPU


def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    torch.ops.aten._scaled_mm(*(tensor.to("meta") for tensor in (a, b, scale_a, scale_b)), out_dtype=out_dtype)
    return (a.double() @ b.double() * scale_a.double() * scale_b.double()).to(out_dtype)


def run_rank(rank, store):
    torch.set_num_threads(1)
    deadline = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=deadline)
    stand_in()
    train()
    dist.destroy_process_group()


def test_it_trains(tmp_path):
    mp.spawn(run_rank, args=(tmp_path / "store",), nprocs=WORLD_SIZE)
