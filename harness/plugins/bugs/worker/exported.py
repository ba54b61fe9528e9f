"""The script of `bug export`: it shows a failure with torch and torchao alone.

The exporter writes another docstring and the values of a case over the constants, and copies the rest. A test for
pytest has the functions that its check calls, and `exported_test.py`.
"""

import contextlib
import dataclasses
import re
import runpy
import sys
from math import prod

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch import nn
from torch.distributed import Work
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

# What fails
DETECT = "gradients"  # "gradients", "crash", "mismatch" of collectives, "scattered" rows of async TP
STEPS = 1  # the last one fails
ERROR = ""  # of a crash: a regular expression
# Layout
MESH = {"dp_shard": 2, "tp": 2}  # ranks along each axis; FSDP2 where it has dp_shard, HSDP where it has dp_replicate
SEQUENCE_PARALLEL = True
LOSS_PARALLEL = True
MIXED_PRECISION = False  # FSDP2 gathers and computes in bfloat16
CHECKPOINT = "none"  # "none", "full", "selective_op", "selective_layer" (every n-th block)
CHECKPOINT_EVERY = 2
COMPILE = ""  # the backend that blocks are compiled with: "inductor", or "aot_eager", which needs no compiler
WAIT = True  # compiled blocks get an embedding that is no longer being reduced
# float8
RECIPE = "tensorwise"  # of torchao, or "bf16"
NOT_CONVERTED = ("output",)  # ends of the names of linears
FP8_ALL_GATHER = False  # FSDP2 gathers weights in float8
PRECOMPUTE = False  # their scales after each optimizer step
FLOAT8_STYLES = False  # TP gathers activations in float8
PAD_INNER_DIM = False
# Model and data
ATTENTION = True
DTYPE = "float32"
VOCAB = 64
DIM = 32
LAYERS = 1
HEAD_DIM = 16
KV_DIM = 32
FFN = 32
BIAS = False
BATCH = 1  # sequences of a data-parallel rank
TOKENS = 32
LR = 1e-3
# How far from one rank is wrong
LIMIT = 0.03  # relative to the norm
ROUNDING = 0.007  # by which clean runs are off
COMPARE_LINEARS = False  # each linear by its own operands too: sharp where TP ranks add what is rounded to bfloat16
LINEAR_LIMIT = 0.012
LINEAR_ROUNDING = 0.0044  # 0.0029 with 2 TP ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPLICAS = prod(ranks for axis, ranks in MESH.items() if axis != "tp")  # data-parallel ranks


def main():
    dist.init_process_group()
    if DEVICE == "cpu":
        stand_in()
    elif DETECT == "scattered":
        symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    for file, _, function in (patch.rpartition(":") for patch in sys.argv[1:]):
        runpy.run_path(file)[function]()
    detect = {"gradients": wrong_numbers, "crash": crash, "mismatch": mismatch, "scattered": wrong_rows}
    return detect[DETECT]()


def say(verdict, expected, found):
    sys.stdout.write(f"rank {dist.get_rank()}: {verdict}\n  expected  {expected}\n  found     {found}\n")


class Block(nn.Module):
    """Of a Llama, without rotary embedding; its linears are side by side."""

    def __init__(self):
        super().__init__()
        if ATTENTION:
            self.attention_norm = nn.RMSNorm(DIM)
            self.wq, self.wo = (nn.Linear(DIM, DIM, bias=BIAS) for _ in range(2))
            self.wk, self.wv = (nn.Linear(DIM, KV_DIM, bias=BIAS) for _ in range(2))
        self.ffn_norm = nn.RMSNorm(DIM)
        self.w1, self.w3 = (nn.Linear(DIM, FFN, bias=BIAS) for _ in range(2))
        self.w2 = nn.Linear(FFN, DIM, bias=BIAS)

    def forward(self, x):
        if ATTENTION:
            h = self.attention_norm(x)
            q, k, v = (w(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.wo(h.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def build(dp, tp):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.embedding = nn.Embedding(VOCAB, DIM)
    model.layers = nn.Sequential(Block()) if LAYERS == 1 else nn.Sequential(*(Block() for _ in range(LAYERS)))
    model.norm = nn.RMSNorm(DIM)
    model.output = nn.Linear(DIM, VOCAB, bias=False)
    model.to(DEVICE, getattr(torch, DTYPE))
    for weight in model.parameters():  # larger from row to row, so that no two shards have the same amax
        weight.data.mul_(torch.linspace(1, 2, weight.numel(), device=DEVICE).view_as(weight))
    if RECIPE != "bf16":
        convert(model)
    distribute(model, dp, tp)
    return model


def convert(model):
    if FP8_ALL_GATHER:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    else:
        config = Float8LinearConfig.from_recipe_name(RECIPE)
    if PAD_INNER_DIM:
        config = dataclasses.replace(config, pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, n: not n.endswith(NOT_CONVERTED))


def distribute(model, dp, tp):
    if tp is not None:
        parallelize_module(model, tp, tp_plan())
    if CHECKPOINT != "none":
        checkpoint(model.layers)
    if COMPILE:
        for name, block in model.layers.named_children():
            setattr(model.layers, name, torch.compile(block, backend=COMPILE, fullgraph=True))
    if COMPILE and WAIT:
        model.embedding.register_forward_hook(lambda *call: torch.clone(call[-1]))  # waits for its reduction over TP
    if dp is not None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if MIXED_PRECISION else MixedPrecisionPolicy()
        for unit in (model.embedding, *model.layers, [model.norm, model.output], model):
            fully_shard(unit, mesh=dp, mp_policy=policy)


def tp_plan():
    stream = Shard(1) if SEQUENCE_PARALLEL else Replicate()
    colwise, rowwise = ColwiseParallel, RowwiseParallel
    if FLOAT8_STYLES:
        colwise, rowwise = Float8ColwiseParallel, Float8RowwiseParallel
    plan = {f"layers.*.{name}": colwise(input_layouts=stream) for name in ("w1", "w3")}
    plan["layers.*.w2"] = rowwise(output_layouts=stream)
    if ATTENTION:
        plan |= {f"layers.*.{name}": colwise(input_layouts=stream) for name in ("wq", "wk", "wv")}
        plan["layers.*.wo"] = rowwise(output_layouts=stream)
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if LOSS_PARALLEL:
        plan["output"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    else:
        plan["output"] = ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    if SEQUENCE_PARALLEL:
        plan |= {name: SequenceParallel() for name in ("norm", "layers.*.ffn_norm")}
    if SEQUENCE_PARALLEL and ATTENTION:
        plan["layers.*.attention_norm"] = SequenceParallel()
    return plan


def checkpoint(layers):
    every = {"none": LAYERS + 1, "selective_layer": CHECKPOINT_EVERY}.get(CHECKPOINT, 1)
    options = {"context_fn": keep_attention} if CHECKPOINT == "selective_op" else {}
    for name, block in list(layers.named_children())[every - 1 :: every]:
        setattr(layers, name, checkpoint_wrapper(block, **options))


def keep_attention():
    kept = [torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten.max.default]
    policy = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(lambda _, op, *args, **kwargs: policy[op not in kept])


def train(*, parallel):
    """In the layout that fails; or on one rank that gets the batches of all ranks one after the other."""
    tokens = torch.randint(VOCAB, (STEPS, REPLICAS, BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    if parallel and REPLICAS > 1:
        tokens = tokens.chunk(REPLICAS, dim=1)[dist.get_rank() * REPLICAS // dist.get_world_size()]
    dp, tp = meshes() if parallel else (alone(), None)
    model = build(dp, tp)
    if COMPARE_LINEARS and parallel:
        watch(model)
    if STEPS > 1:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-5, foreach=False)
    for step, batches in enumerate(tokens.to(DEVICE)):
        if step > 0:
            optimizer.step()
            optimizer.zero_grad()
            if PRECOMPUTE:
                precompute_float8_dynamic_scale_for_fsdp(model)
        for batch in batches:
            with loss_parallel() if LOSS_PARALLEL and tp is not None else contextlib.nullcontext():
                logits = model(batch).float().flatten(0, 1)
                (F.cross_entropy(logits, batch.roll(-1, 1).flatten()) / len(batches)).backward()
    return model


def meshes():
    """Those of data-parallel and of TP ranks; None where the layout has none."""
    mesh = init_device_mesh(DEVICE, tuple(MESH.values()), mesh_dim_names=tuple(MESH)) if MESH else {}
    dp = (
        mesh["dp_replicate", "dp_shard"] if "dp_replicate" in MESH else mesh["dp_shard"] if "dp_shard" in MESH else None
    )
    return dp, mesh["tp"] if "tp" in MESH else None


def alone():
    """A mesh of this rank alone, where FSDP2 shards."""
    if "dp_shard" not in MESH:
        return None
    return init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("rank", "alone"))["alone"]


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


# Wrong numbers: gradients, or what one linear computes, are not those of one rank.


def wrong_numbers():
    name, off, a, b, limit, _ = farthest()
    say(
        "FAULT: wrong numbers" if off > limit else "fixed: numbers are right",
        f"{name} as of one rank, up to {limit:g}; norm {b.norm():.5g}",
        f"it is {off:.3g} off; norm {a.norm():.5g}",
    )
    return int(off > limit)


def farthest():
    """What is farthest from one rank: its name, by how much of its norm, the values, the limit, the rounding."""
    models = train(parallel=True), train(parallel=False)
    found, expected = ({name: whole(p.grad) for name, p in model.named_parameters()} for model in models)
    pairs = {f"the gradient of {name}": (found[name], grad, LIMIT, ROUNDING) for name, grad in expected.items()}
    if COMPARE_LINEARS:
        pairs |= linears()
    off = {name: ((a - b).norm() / b.norm()).nan_to_num(9e9).item() for name, (a, b, *_) in pairs.items()}
    name = max(off, key=lambda name: off[name] / pairs[name][2])
    return name, off[name], *pairs[name]


CALLS: list[dict[str, object]] = []  # of float8 linears


def watch(model):
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):  # what is between the hooks of its TP style
            module.register_forward_hook(lambda *call, name=name: keep(name, *call), prepend=True)


def keep(name, module, args, output):
    kept = {"name": name, "module": module, "weight": whole(module.weight), "x": args[0], "y": output}
    args[0].register_hook(lambda grad: kept.update(grad_x=grad))
    output.register_hook(lambda grad: kept.update(grad_y=grad))
    CALLS.append(kept)


def linears():
    """By name what a call in the last step computed, what one rank computes, and how far it may be."""
    compared, limits = {}, (LINEAR_LIMIT, LINEAR_ROUNDING)
    for call in [call for call in CALLS if "grad_x" in call]:  # none that checkpointing repeats
        name, module = call["name"], call["module"]
        alone = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        alone.weight = nn.Parameter(call["weight"])
        x = whole(call["x"]).requires_grad_()
        y = Float8Linear.from_float(alone, config=module.config)(x)
        y.backward(whole(call["grad_y"]))
        grad = alone.weight.grad.float()
        dist.all_reduce(grad)  # TP ranks have the same, others another batch
        compared[f"the output of {name}"] = whole(call["y"]), y.detach(), *limits
        compared[f"the gradient of the input of {name}"] = whole(call["grad_x"]), x.grad, *limits
        mean = grad / dist.get_world_size()
        compared[f"the gradient of the weight of {name}"] = whole(module.weight.grad), mean, *limits
    return compared


# A crash: the run raises the reported error.


def crash():
    try:
        train(parallel=True)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    else:
        raised = ""
    same = bool(raised) and re.search(ERROR, raised) is not None
    verdict = "FAULT: it raises" if same else "cannot tell: another error" if raised else "fixed: it runs"
    say(verdict, f"no error; as reported: {ERROR}", raised or "no error")
    return 1 if same else 2 if raised else 0


# A mismatch: ranks call different collectives. With NCCL they hang, or get each other's bytes.


def mismatch():
    try:
        with Compare():
            train(parallel=True)
    except Mismatch as error:
        say("FAULT: with NCCL they hang, or get wrong bytes", Compare.EXPECTED, error)
        return 1
    say("fixed", Compare.EXPECTED, "they do")
    return 0


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


# Wrong rows of async TP's fused matmul and reduce-scatter, called as torch's fusion pass calls it.


def wrong_rows():
    found, expected, wrong = scattered()
    say(
        "FAULT: wrong rows" if wrong.any() else "fixed: the rows are right",
        f"the rows of a matmul, then a reduce-scatter: {expected[..., 0].flatten()[:4].tolist()} ...",
        f"{int(wrong.sum())} of {wrong.numel()} are wrong: {found[..., 0].flatten()[:4].tolist()} ...",
    )
    return int(wrong.any())


def scattered():
    """The rows of the fused operator, those of a matmul and then a reduce-scatter, and which of them are wrong."""
    group = dist.group.WORLD
    torch.manual_seed(group.rank())
    x = torch.randn(BATCH, TOKENS, FFN // group.size(), device=DEVICE).to(torch.float8_e4m3fn)
    w = torch.randn(DIM, FFN // group.size(), device=DEVICE).to(torch.float8_e4m3fn)
    one, rows, dtype = torch.ones((), device=DEVICE), x.flatten(0, 1), torch.bfloat16
    product = torch._scaled_mm(rows, w.t(), one, one, out_dtype=dtype).unflatten(0, x.shape[:2]).float()
    dist.all_reduce(product)
    expected = product.chunk(group.size(), dim=1)[group.rank()]  # scattered along the sequence
    found = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        # batch and sequence are collapsed, so the dim to scatter, once 1, is 0
        *(rows, w.t(), one, one, "sum", 1, 0, group.group_name, [*x.shape[:2], DIM]),
        out_dtype=dtype,
    ).view_as(expected)
    return found, expected, (found - expected).norm(dim=-1) > 0.1 * expected.norm(dim=-1)


def stand_in():
    """What a CPU lacks."""
    torch.library.impl("aten::_scaled_mm", "cpu", scaled_mm)  # with the rules of a GPU
    if FP8_ALL_GATHER:
        torch.library.impl("c10d::_allgather_base_", "cpu", all_gather)  # of float8, which gloo does not know
    if FLOAT8_STYLES:
        torch.library.impl("c10d::allgather_into_tensor_coalesced_", "cpu", all_gather_coalesced)
    if DETECT == "scattered":
        torch.library.impl("aten::_scaled_mm.out", "cpu", scaled_mm_out)
        fused = symm_mem._fused_scaled_matmul_reduce_scatter
        torch.library.impl("symm_mem::fused_scaled_matmul_reduce_scatter", "cpu", fused)
        symm_mem._pipelined_produce_and_all2all = produce_and_exchange


def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    torch.ops.aten._scaled_mm(*(tensor.to("meta") for tensor in (a, b, scale_a, scale_b)), out_dtype=out_dtype)
    return (a.double() @ b.double() * scale_a.double() * scale_b.double()).to(out_dtype)


def scaled_mm_out(*args, out, **kwargs):
    return out.copy_(scaled_mm(*args, **kwargs))


def all_gather(output, tensor, group, *_):
    gloo = dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))
    return output, Work.boxed(gloo._allgather_base(output.view(torch.uint8), tensor.view(torch.uint8)))


def all_gather_coalesced(outputs, tensors, group, *_):
    gloo = dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))
    return Work.boxed(gloo._allgather_base(outputs[0].view(torch.uint8), tensors[0].view(torch.uint8)))


def produce_and_exchange(produce, output, group_name, out_chunk_dim=0):
    """`_pipelined_produce_and_all2all`, whose chunks are exchanged by a collective."""
    chunks = output.chunk(dist.get_world_size(), dim=out_chunk_dim)
    produced = torch.empty(len(chunks), *chunks[0].shape, dtype=output.dtype)
    for rank, chunk in enumerate(produced):
        produce(rank, chunk)
    received = [torch.empty_like(produced) for _ in chunks]
    dist.all_gather(received, produced)
    for chunk, sent in zip(chunks, received, strict=True):
        chunk.copy_(sent[dist.get_rank()])


if __name__ == "__main__":
    sys.exit(main())
