"""What `exec` and the library cost, in CPU seconds of all their processes, each beside its limit.

    python ci/bench/exec.py [start] [watch] [library] [--rounds 3] [--steps 10]

`start`: an empty script under `exec`, beside a Python that imports torch and torchao. `watch`: `--watch` beside
`--no-watch`, without what an empty script costs. `library`: the test of two layouts of docs/library.md behind a first
call on ranks, for a build that is new to the cache, beside that call alone; and the same for a build that fails.
Rounds take turns, and of each the median is printed. Exit code 1 where a limit is passed.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXEC = (sys.executable, "-m", "harness", "exec")
SCRIPT = ROOT / "tests" / "plugins" / "exec" / "plain.py"
WARM = """

def nothing():
    return 0

def test_warm(fp8_ranks):
    fp8_ranks(nothing, 2)
"""
FAILS = """

class OwnLoss(Trainer):
    def reported(self, loss):
        return loss
"""


def cpu_s(folder: Path, *command: str, **environment: str) -> float:
    """Return the CPU seconds of a command and of all processes that it waited for."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    if done.returncode and "pytest" not in command:
        raise SystemExit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start(folder: Path, _: argparse.Namespace) -> dict[str, float]:
    """Return what importing costs, and what starting an empty script does."""
    (folder / "empty.py").write_text("")
    return {
        "import torch, torchao": cpu_s(folder, sys.executable, "-c", "import torch, torchao.float8"),
        "exec of an empty script": cpu_s(folder, *EXEC, "--", "python", "empty.py"),
    }


def watch(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return what a script costs that is not watched, and one that is."""
    (folder / "empty.py").write_text("")
    text = SCRIPT.read_text().replace(
        'init_process_group("virtual", init_method=os.environ["INIT_METHOD"])', "init_process_group()"
    )
    (folder / "plain.py").write_text(text)
    begun = cpu_s(folder, *EXEC, "--", "python", "empty.py")
    words = ("torchrun", "--nproc-per-node", "2", "plain.py")
    sizes = {"STEPS_OF": str(options.steps), "DIM": "256"}
    return {way: cpu_s(folder, *EXEC, way, "--", *words, **sizes) - begun for way in ("--no-watch", "--watch")}


def library(folder: Path, _: argparse.Namespace) -> dict[str, float]:
    """Return what a first call on ranks costs, and what comes on top with a test of two layouts."""
    page = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "library.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    head = page[0].partition("\n\ndef test_layouts")[0]  # imports what the test itself does
    texts = {"first call": head + WARM, "two layouts": page[0] + WARM}
    texts["two layouts of a build that fails"] = (page[0] + FAILS).replace("(Trainer, [", "(OwnLoss, [") + WARM
    spent = dict[str, float]()
    for name, text in texts.items():
        test = folder / f"test_{len(spent)}.py"
        test.write_text(text)
        state = tempfile.mkdtemp(dir=folder)
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name)
        spent[name] = cpu_s(folder, *command, FP8_HARNESS_STATE=state)
    first = spent.pop("first call")
    return {name: seconds - first for name, seconds in spent.items()}


def _share(spent: dict[str, float]) -> float:
    base, more = spent.values()
    return more / base


# By name: how it is measured, what is compared with the limit, and the limit.
COSTS: dict[
    str, tuple[Callable[[Path, argparse.Namespace], dict[str, float]], Callable[[dict[str, float]], float], float]
] = {
    "start": (start, _share, 1.5),
    "watch": (watch, _share, 1.25),
    "library": (library, lambda spent: max(spent.values()), 5.0),
}


def main() -> int:
    """Print a line for each cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", choices=[*COSTS, []], metavar="COST", help=f"{', '.join(COSTS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="steps of the script that is watched (default 10)")
    options = parser.parse_args()
    passed = False
    for name in options.names or COSTS:
        measure, number_of, limit = COSTS[name]
        rounds = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append(measure(Path(folder), options))
        numbers = [number_of(spent) for spent in rounds]
        median = statistics.median(numbers)
        spent = ", ".join(f"{what} {statistics.median(one[what] for one in rounds):.2f} s" for what in rounds[0])
        print(f"{name}: {spent}: {median:.2f} ({min(numbers):.2f} to {max(numbers):.2f}), at most {limit}", flush=True)
        passed = passed or median > limit
    return int(passed)


if __name__ == "__main__":
    sys.exit(main())
