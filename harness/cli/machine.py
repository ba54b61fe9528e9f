"""Options of the machine that is predicted: its devices, and how they are connected."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--device --gpus-per-node --network-gb-s`, passed to the command as one parameter `on` (a `Machine`)."""

    @functools.wraps(command)
    def with_machine(*, device: str, gpus_per_node: int, network_gb_s: float, **given: Any) -> Any:
        from harness.performance.machine import machine

        return command(on=machine(device, gpus_per_node=gpus_per_node, network_gb_s=network_gb_s), **given)

    text = "GB/s of one device to other nodes, in one direction."
    positive = click.FloatRange(min=0, min_open=True)
    found: Callable[..., Any] = with_machine
    for decorate in (
        click.option("--network-gb-s", type=positive, default=50.0, show_default=True, help=text),
        click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True),
        click.option("--device", default="h100", show_default=True, metavar="NAME", help="h100, h200, b200, mi300x, …"),
    ):
        found = decorate(found)
    return found
