"""Options of the machine that is predicted: its devices, and how they are connected."""

from __future__ import annotations

import functools
from typing import Any

import click

from harness.cli.options import ABOVE_0, AT_LEAST_1, Command, compose_options


def machine_options(command: Command) -> Command:
    """`--device --gpus-per-node --network-gb-s`, passed to the command as one parameter `on` (a `Machine`)."""

    @functools.wraps(command)
    def with_machine(*, device: str, gpus_per_node: int, network_gb_s: float, **given: Any) -> Any:
        from harness.performance.machine import machine

        return command(on=machine(device, gpus_per_node=gpus_per_node, network_gb_s=network_gb_s), **given)

    text = "GB/s of one device to other nodes, in one direction."
    return compose_options(
        click.option("--device", default="h100", show_default=True, metavar="NAME", help="h100, h200, b200, mi300x, …"),
        click.option("--gpus-per-node", type=AT_LEAST_1, default=8, show_default=True),
        click.option("--network-gb-s", type=ABOVE_0, default=50.0, show_default=True, help=text),
    )(with_machine)
