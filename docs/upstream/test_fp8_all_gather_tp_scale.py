"""With FSDP2 and TP every TP rank scales its part of a weight by itself.

Float8 tensorwise, FSDP2, TP. Gradients must be those of one rank that gets the batches of all ranks. It fails with
torch 2.13.0+cpu and torchao 0.18.0.
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
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

NOT_CONVERTED = ("output",)  # ends of the names of linears
VOCAB = 64
DIM = 32
BATCH = 1  # sequences of a data-parallel rank
TOKENS = 32
LIMIT, ROUNDING = 0.03, 0.007  # relative to the norm; clean runs are this far
DEVICE = "cpu"
REPLICAS = 2  # data-parallel ranks
WORLD_SIZE = 4
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


def build(dp, tp):
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
    if tp is not None:
        parallelize_module(model, tp, tp_plan())
    if dp is not None:
        for unit in (model.embedding, *model.layers, [model.norm, model.output], model):
            fully_shard(unit, mesh=dp)
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


def train(*, parallel):
    """In the layout that fails; or on one rank that gets the batches of all ranks one after the other."""
    tokens = torch.randint(VOCAB, (1, REPLICAS, BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    dp, tp = None, None
    if parallel:
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp_shard", "tp"))
        dp = mesh["dp_shard"]
        tp = mesh["tp"]
        tokens = tokens.chunk(REPLICAS, dim=1)[dist.get_rank() * REPLICAS // dist.get_world_size()]
    else:
        dp = init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("rank", "alone"))["alone"]
    model = build(dp, tp)
    for batches in tokens.to(DEVICE):
        for batch in batches:
            logits = model(batch).float().flatten(0, 1)
            (F.cross_entropy(logits, batch.roll(-1, 1).flatten()) / len(batches)).backward()
    return model


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def farthest():
    """What is farthest from one rank: its name, by how much of its norm, the values, the limit, the rounding."""
    models = train(parallel=True), train(parallel=False)
    found, expected = ({name: whole(p.grad) for name, p in model.named_parameters()} for model in models)
    pairs = {f"the gradient of {name}": (found[name], grad, LIMIT, ROUNDING) for name, grad in expected.items()}
    off = {name: ((a - b).norm() / b.norm()).nan_to_num(9e9).item() for name, (a, b, *_) in pairs.items()}
    name = max(off, key=lambda name: off[name] / pairs[name][2])
    return name, off[name], *pairs[name]


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
    name, off, found, expected, limit, rounding = farthest()
    assert off <= limit, (
        f"{name} is {off:.3g} from that of one rank, relative to its norm; rounding explains {rounding:g}, "
        f"{limit:g} is allowed. Its norm is {found.norm():.5g}, that of one rank {expected.norm():.5g}."
    )
    dist.destroy_process_group()


def test_gradients_are_those_of_one_rank(tmp_path):
    mp.spawn(run_rank, args=(tmp_path / "store",), nprocs=WORLD_SIZE)
