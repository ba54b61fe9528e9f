"""What passes the fabric, by `Group.exchange` and `Channel.send`, held against what hooks reported, in order."""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.worker.dispatch_hooks import collectives, hook
from harness.worker.virtual.fabric import Channel, Group

Exchange = tuple[str, int, tuple[int, ...]]

_reported: list[Exchange] = []
_sent: list[Exchange] = []


def _observe(seen: collectives.Exchange) -> None:
    _reported.append((seen.kind, seen.elements * seen.dtype.itemsize, seen.ranks))


def _check_last() -> None:
    rest = _reported[len(_sent) - 1 :]
    assert rest[:1] == _sent[-1:], f"sent {_sent[-1]}, reported {rest}"


def watch() -> None:
    """From now on an exchange that no hook reported is an error."""
    stock, stock_send = Group.exchange, Channel.send

    def exchange(group: Group, kind: str, payload: torch.Tensor, **given: Any) -> list[torch.Tensor]:
        if kind != "open" and hook.observed():
            table_bytes = 8 * group.size if kind == "all_to_all" else 0
            _sent.append((kind, payload.numel() - table_bytes, group.ranks))
            _check_last()
        return stock(group, kind, payload, **given)

    def send(channel: Channel, payload: torch.Tensor, code: int) -> None:
        if hook.observed():
            ranks = _reported[len(_sent)][2] if len(_reported) > len(_sent) else ()
            _sent.append(("send", payload.numel(), ranks))
            _check_last()
        stock_send(channel, payload, code)

    collectives.observers.append(_observe)
    Group.exchange = exchange
    Channel.send = send


def compare(*_: Any) -> None:
    """Raises if more was told of than was sent, or nothing."""
    assert _sent and len(_reported) == len(_sent), f"told {_reported[len(_sent) :]}, which was not sent"


def apply() -> None:
    """Watch a run that trains."""
    watch()
    register_optimizer_step_post_hook(compare)
