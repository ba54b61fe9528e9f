"""What `fp8-harness run` shows on a real terminal of 60, 80 and 120 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.lines import read_run

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

LAYOUTS = (
    'dp_replicate = 2, dp_shard = 2, tp = 2, tp_styles = "float8", checkpointing = "full", dtype = "bfloat16"',
    "dp_shard = 4, fp8_all_gather = true, precompute_scale = true",
    "dp_shard = 2, tp = 2",
    "tp = 2, vocab_size = 2256, layers = 4",
    "dp_shard = 2",
)


def slow_tier(project: Command) -> None:
    """Five cases that take half a second each."""
    axes = 'recipe = "tensorwise", steps = 3, loss_tolerance = 0.05, seed = 6'
    project.cases("slow", *(f"{axes}, {layout}" for layout in LAYOUTS))


class OnTerminal:
    """`fp8-harness` on a terminal of so many columns."""

    def __init__(self, project: Command, columns: int, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {**project.environment_of_runs(), "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        self.process = project.start(*arguments, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)

    def close(self) -> None:
        os.close(self._ours)

    def read_until(self, words: str | None = None) -> str:
        """What is shown, without escape sequences, up to these words or the end."""
        shown = b""
        while words is None or words.encode() not in shown:
            try:
                some = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                break
            if not some:
                break
            shown += some
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


@pytest.mark.parametrize("columns", [60, *(pytest.param(width, marks=pytest.mark.sweep) for width in (80, 120))])
def test_progress_and_table_fit(project: Command, columns: int) -> None:
    slow_tier(project)
    terminal = OnTerminal(project, columns, "run", "slow", "--device", "cpu", "-j", "4")
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", terminal.read_until())]
    assert terminal.process.wait(timeout=30) == 0
    frames = [line for line in lines if "━" in line]
    running = [frame for frame in frames if "seed6" in frame or "…" in frame]
    assert running and all(len(frame) < columns for frame in frames)
    assert all(re.search(r"━ (?:cases|references) \d+/\d+ 0:00:\d\d ", frame) for frame in running)
    for name in (line.split()[1] for line in project.run("list", "slow").stdout.splitlines()):
        assert sum(line.startswith(name) for line in lines) == 1
    assert sum("passed" in line for line in lines) == 5 + 1
    again = [line.rstrip() for line in re.split(r"[\r\n]+", OnTerminal(project, columns, "show").read_until())]
    assert len(again) > 6 and again == lines[-len(again) :], "`show` prints what `run` printed at its end"


def test_an_interrupt_leaves_one_line_for_what_was_not_run(project: Command) -> None:
    slow_tier(project)
    terminal = OnTerminal(project, 80, "run", "slow", "--device", "cpu", "-j", "1")
    terminal.read_until("2/")
    time.sleep(0.2)
    terminal.process.send_signal(signal.SIGINT)
    text = terminal.read_until()
    assert terminal.process.wait(timeout=30) == 130
    (line,) = [line.strip() for line in text.splitlines() if "not run" in line]
    assert re.fullmatch(r"not run: [34] cases \(`fp8-harness run --resume` runs them\)", line)
    assert "was not run" not in text


def test_a_closed_terminal_ends_a_run_as_an_interrupt_does(project: Command) -> None:
    """SIGHUP, and nobody reads any more what it prints: the results are written all the same."""
    slow_tier(project)
    out = project.folder / "partial.json"
    terminal = OnTerminal(project, 80, "run", "slow", "--device", "cpu", "-j", "1", "--json", str(out))
    terminal.read_until("2/")
    family = psutil.Process(terminal.process.pid).children(recursive=True)
    terminal.close()
    terminal.process.send_signal(signal.SIGHUP)
    assert terminal.process.wait(timeout=30) == 130
    assert psutil.wait_procs(family, timeout=5)[1] == []
    document = read_run(out)
    assert document["interrupted"] is True
    assert {case["verdict"] for case in document["cases"]} == {"passed", "not_run"}
    assert "5 cases: " in project.call("show").stdout
