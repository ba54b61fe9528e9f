"""Options that several commands share, and the values they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from harness.errors import HarnessError
from harness.plan import Device, EngineKind, Plan, default_program, default_slots

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_JOBS = 2


def root_option(command: Command) -> Command:
    """`--root DIR`: the project to work in."""
    text = "Project root with cases/ and golden/. Default: the nearest one at or above the current folder."
    return click.option("--root", metavar="DIR", help=text)(command)


def query_options(command: Command) -> Command:
    """`[TIER|FILE]... --tier --case --select`: which cases."""
    for decorate in reversed(
        (
            click.argument("sources", metavar="[TIER|FILE]...", nargs=-1),
            click.option("--tier", "tiers", metavar="TIER", multiple=True, help="A tier by name; may be repeated."),
            click.option("--case", "case_ids", metavar="ID", multiple=True, help="One case by id; may be repeated."),
            click.option(
                "--select",
                "expressions",
                metavar="EXPR",
                multiple=True,
                help="Keep cases that match: 'tp=4,8 recipe!=bf16', 'id~*ac.full*'. Repeated: all must match.",
            ),
        )
    ):
        command = decorate(command)
    return command


def plan_options(command: Command) -> Command:
    """`--device --engine -j --slots --timeout-s`: how cases are run."""
    for decorate in reversed(
        (
            click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
            click.option(
                "--engine",
                type=click.Choice(["zygote", "torchrun"]),
                default="zygote",
                show_default=True,
                help="zygote: fresh ranks forked from one warm process. torchrun: one torchrun per case, slower.",
            ),
            click.option(
                "-j", "--jobs", type=click.IntRange(min=1), default=DEFAULT_JOBS, show_default=True,
                help="Cases run at the same time, as far as slots allow.",
            ),
            click.option(
                "--slots",
                type=click.IntRange(min=1),
                help="Ranks at the same time on this machine, over all jobs that share it. "
                "Default on CPU: two a core, at least 8; on CUDA: the visible devices.",
            ),
            click.option(
                "--timeout-s",
                type=click.FloatRange(min=0, min_open=True),
                help="Seconds one attempt at a case may take. Default: 120 plus one for every step of every rank.",
            ),
        )
    ):
        command = decorate(command)
    return command


def make_plan(
    *,
    device: str,
    engine: EngineKind,
    jobs: int,
    slots: int | None,
    timeout_s: float | None,
    root: str | None,
    inject: tuple[str, ...] = (),
    keep_logs: Path | None = None,
) -> Plan:
    """The plan that these options describe; HarnessError for an injection or a device that is not there."""
    from harness.injection import parse_injection
    from harness.machine import resolve_device

    resolved = resolve_device(device)
    return Plan(
        device=resolved,
        slots=slots or _slots(resolved),
        jobs=jobs,
        engine=engine,
        program=default_program(),
        injections=tuple(parse_injection(text) for text in inject),
        timeout_s=timeout_s,
        logs=_log_folder(keep_logs) if keep_logs is not None else None,
        root_option=root,
    )


def _slots(device: Device) -> int:
    if device == "cpu":
        return default_slots()
    from harness.engine.devices import visible_devices

    return len(visible_devices())


def _log_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(
            f"cannot make this folder: {error.strerror}.", where=f"--keep-logs {folder}", fix="name another one."
        ) from error
    return folder.resolve()
