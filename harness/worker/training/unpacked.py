"""The documents of packed sequences, each alone: what the loss of the first step is without packing and padding."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.matrix.case import Case, Layout
from harness.trace import DocumentsAlone
from harness.worker.targets import data
from harness.worker.targets.contract import build_target
from harness.worker.targets.target import IGNORED, World
from harness.worker.tensors.reduction import gradient_norm, squared_norm_share
from harness.worker.training.train import evaluate

Document = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens [1, length + 1], labels and positions [1, length]


def documents_alone(case: Case, device: torch.device) -> DocumentsAlone | None:
    """Return step 1 of a target that is built anew and called with one document at a time, on one rank.

    None where a scale is of several tokens, so that a document alone has others. Where one of a weight gradient alone
    is, the loss is evaluated: of a few tokens float8 kernels refuse that matmul.
    """
    traits = case.float8.traits
    if not traits.keeps_tokens_apart("forward"):
        return None
    documents = [tuple(part.to(device) for part in document) for document in _documents(case)]
    alone = replace(case, layout=Layout())
    world = World(device=device, fsdp=case.uses_fsdp, dp_rank=0, microbatches=len(documents), local_batch=1)
    target = build_target(alone, world)
    data.write_weights(target.model, alone)
    batches, norms = [*zip(*documents, strict=True)], list[float]()
    if not (traits.keeps_tokens_apart("dgrad") and traits.keeps_tokens_apart("wgrad")):
        return DocumentsAlone(loss=float(evaluate(target, batches, 1)))
    parameters = [*target.model.parameters()]
    seen = register_optimizer_step_pre_hook(lambda *_: norms.append(gradient_norm(squared_norm_share(parameters))))
    loss, _ = target.step(*batches)
    seen.remove()
    return DocumentsAlone(loss=float(loss), grad_norm=norms[0])


def _documents(case: Case) -> Iterator[Document]:
    """Yield every document of step 1: its last token has no label, but that of a sequence which goes on behind it."""
    train, tokens = case.train, torch.from_numpy(data.global_tokens(case)[0])
    for number, sequence in enumerate(tokens):
        begin, (*lengths, last) = 0, train.documents(number, step=1)
        for length in (*lengths, *([] if train.packing == "padded" else [last])):
            given = sequence[begin : begin + length + 1][None]
            begin += length
            labels = given[:, 1:].clone()
            if begin < train.seq_len:
                labels[:, -1] = IGNORED
            yield given, labels, torch.arange(length)[None]
