"""Records how probable the labels of the last step were: what people compare by hand across layouts."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.matrix.case import Case
from harness.matrix.dims.dimension import Played
from harness.matrix.layout import batch_of, dp_rank, positions_of_ranks
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.probe import Probe
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.targets.data import batch_slice, global_tokens
from harness.worker.tensors.names import IN_PIECES, is_compiled


class LogprobProbe(Probe):
    """Reads the logits of the last linear that is as wide as the vocabulary. `plays`: as of `ProbeSet`."""

    def __init__(self, case: Case, device: torch.device, plays: Played | None = None) -> None:
        super().__init__(case, device)
        layout, train, rank = case.layout, case.train, torch.distributed.get_rank()
        if plays is None:
            pieces = positions_of_ranks(layout, train.seq_len)
            self._pieces = pieces[dp_rank(layout, rank) % len(pieces) :][:1]
        else:
            self._pieces = plays.positions
        mine = slice(0, train.global_batch) if plays else batch_slice(case, batch_of(layout, rank))
        self._first = mine.start
        self._labels = torch.from_numpy(global_tokens(case)[-1, mine, 1:])
        self._values: list[Any] = []  # by sequence, in float64: infinite where another rank has the position

    def attach(self, model: nn.Module) -> None:
        widths = (self._case.model.vocab_size, self._case.model.padded_vocab_size)
        linears = ((name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear))
        # The module around one that computes in pieces is called once.
        names = [name.removesuffix(f".{IN_PIECES}") for name, linear in linears if linear.out_features in widths]
        for name in names[-1:]:
            if "_orig_mod." not in name and not is_compiled(model):  # a hook would be compiled with it
                model.get_submodule(name).register_forward_hook(self._read)

    @torch.no_grad()
    @unobserved()
    def _read(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        if self._step != self._case.train.steps or PROCESS.evaluating or in_backward():
            return
        logits = output.full_tensor() if isinstance(output, DTensor) else output
        logits = logits.flatten(0, -2)[:, : self._case.model.vocab_size].double()
        count = len(logits) // sum(map(len, self._pieces))
        labels = self._labels[len(self._values) :][:count].to(logits.device)
        asked = torch.cat([labels[:, piece].flatten() for piece in self._pieces])
        if logits.size(1) == self._case.model.vocab_size and len(asked) == len(logits):
            found = logits.gather(1, asked[:, None])[:, 0] - logits.logsumexp(1)
            values = np.full((count, self._case.train.seq_len), np.inf)
            for piece, part in zip(self._pieces, found.cpu().chunk(len(self._pieces)), strict=True):
                values[:, piece] = part.view(count, -1).numpy()
            self._values += list(values)

    def result(self) -> dict[int, bytes]:
        """Return the values by the number of their sequence; empty where no such logits were seen."""
        return {self._first + at: values.tobytes() for at, values in enumerate(self._values)}
