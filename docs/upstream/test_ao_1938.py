"""The float8 all-gather of uneven shards crashes.

Float8 tensorwise, FSDP2. Ranks of a group must call the same collectives, of the same sizes. It fails with torch
2.13.0+cpu and torchao 0.18.0, https://github.com/pytorch/ao/issues/1938.
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
from torch.distributed import Work
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

NOT_CONVERTED = ("output",)  # ends of the names of linears
VOCAB = 64
DIM = 32
BATCH = 1  # sequences of a data-parallel rank
TOKENS = 32
DEVICE = "cpu"
REPLICAS = 3  # data-parallel ranks
WORLD_SIZE = 3
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


def build(dp):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.embedding = nn.Embedding(VOCAB, DIM)
    model.layers = nn.Sequential(Block())
    model.norm = nn.RMSNorm(DIM)
    model.output = nn.Linear(DIM, VOCAB, bias=False)
    model.to(DEVICE, torch.float32)
    for weight in model.parameters():  # larger from row to row, so that no two shards have the same amax
        weight.data.mul_(torch.linspace(1, 2, weight.numel(), device=DEVICE).view_as(weight))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, n: not n.endswith(NOT_CONVERTED))
    if dp is not None:
        for unit in (model.embedding, *model.layers, [model.norm, model.output], model):
            fully_shard(unit, mesh=dp)
    return model


def train():
    """In the layout that fails; or on one rank that gets the batches of all ranks one after the other."""
    tokens = torch.randint(VOCAB, (1, REPLICAS, BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    dp = None
    mesh = init_device_mesh(DEVICE, (3,), mesh_dim_names=("dp_shard",))
    dp = mesh["dp_shard"]
    tokens = tokens.chunk(REPLICAS, dim=1)[dist.get_rank() * REPLICAS // dist.get_world_size()]
    model = build(dp)
    for batches in tokens.to(DEVICE):
        for batch in batches:
            logits = model(batch).float().flatten(0, 1)
            (F.cross_entropy(logits, batch.roll(-1, 1).flatten()) / len(batches)).backward()
    return model


class Mismatch(AssertionError):
    pass


class Compare(TorchDispatchMode):
    """Before every collective, the ranks of its group tell each other what they are about to call."""

    EXPECTED = "ranks of a process group that call the same"

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        if op.namespace == "c10d" and groups:
            group = dist.ProcessGroup.unbox(groups[0])
            outputs = torch.utils._pytree.tree_leaves(args[0])  # of a scatter, one rank alone has the inputs
            sizes = [output.nbytes for output in outputs if isinstance(output, torch.Tensor)]
            calls = [None] * group.size()
            dist.all_gather_object(calls, f"{op} of {sizes} bytes", group)
            if len(set(calls)) > 1:
                raise Mismatch(calls)
        return op(*args, **(kwargs or {}))


def stand_in():
    """What a CPU lacks."""
    torch.library.impl("aten::_scaled_mm", "cpu", scaled_mm)  # with the rules of a GPU
    torch.library.impl("c10d::_allgather_base_", "cpu", all_gather)  # of float8, which gloo does not know


def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    torch.ops.aten._scaled_mm(*(tensor.to("meta") for tensor in (a, b, scale_a, scale_b)), out_dtype=out_dtype)
    return (a.double() @ b.double() * scale_a.double() * scale_b.double()).to(out_dtype)


def all_gather(output, tensor, group, *_):
    gloo = dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))
    return output, Work.boxed(gloo._allgather_base(output.view(torch.uint8), tensor.view(torch.uint8)))


def run_rank(rank, store):
    torch.set_num_threads(1)
    deadline = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=deadline)
    stand_in()
    with Compare():  # raises where with NCCL ranks hang, or get each other's bytes
        train()
    dist.destroy_process_group()


def test_ranks_call_the_same_collectives(tmp_path):
    mp.spawn(run_rank, args=(tmp_path / "store",), nprocs=WORLD_SIZE)
