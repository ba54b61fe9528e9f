"""Follows calls of torch's functions, and what the forward of a model sends by itself.

FSDP, DTensor, DDP and torchao send for parameters. Whatever else a forward sends is parts of sequences, tokens for
experts, or what is between stages: ranks share more than parameters then, as no layout says that is derived.
"""

import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from harness.plugins.exec.worker.script import is_of_script, line_of_frame
from harness.worker.dispatch_hooks.collectives import Exchange, observers

_OF_PARAMETERS = re.compile(r"/torch/distributed/(fsdp|tensor/(?!experimental))|/torchao/|/torch/nn/parallel/")
_OF_ITSELF = re.compile(r"/torch/distributed/(tensor/experimental|pipelining)|/torch/nn/modules/module\.py$")


def follow(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Callable[[], None]:
    """Look before or after each call of a function of `owner`, with its arguments. Return what undoes that."""
    stock = getattr(owner, name)

    def followed(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = stock(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, outermost(stock, followed))
    return functools.partial(setattr, owner, name, stock)


def outermost(stock: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, to stand for `stock`: a mode of torch calls a function again by its name, and that is one call."""
    inside = list[bool]()

    @functools.wraps(stock)
    def outer(*args: Any, **kwargs: Any) -> Any:
        if inside:
            return stock(*args, **kwargs)
        inside.append(True)
        try:
            return call(*args, **kwargs)
        finally:
            inside.clear()

    return outer


@functools.cache
def _is_of_parameters(file: str) -> bool | None:
    """Return whether this file sends for parameters; None where what called it tells."""
    if _OF_PARAMETERS.search(file):
        return True
    return False if _OF_ITSELF.search(file) or is_of_script(file) else None


class Exchanges:
    """`first`: what was sent while the model was `inside` its forward, or to one rank alone; empty for nothing."""

    def __init__(self) -> None:
        self.inside, self.first = False, ""
        observers.append(self._see)

    def close(self) -> None:
        """Notice no more."""
        observers.remove(self._see)

    def _see(self, exchange: Exchange) -> None:
        sent = self.inside or exchange.kind == "send"
        if self.first or not sent or exchange.elements < 2 or len(exchange.ranks) < 2:
            return  # a single number is an amax or a count
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and (of_parameters := _is_of_parameters(frame.f_code.co_filename)) is None:
            frame = frame.f_back
        if frame is not None and not of_parameters:
            where = line_of_frame(frame)
            ranks = ", ".join(map(str, exchange.ranks))
            self.first = f"{exchange.kind} over ranks {ranks}{f' ({where})' if where else ''}"
