"""`bug export`: the script shows the fault where this project is not installed, and is content with the fix."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.matrix.caseid import parse_case_id
from harness.plugins.bugs.export import constants, exported_case, exported_fault, script
from harness.plugins.bugs.pytest_file import models, pytest_file
from harness.verdict import FailureSignature
from tests.acceptance.conftest import REPOSITORY, Command
from tests.fork_servers import ForkServers

Run = Callable[..., subprocess.CompletedProcess[str]]
SMALL = "dim.32-layers.1-heads.2-kvheads.2-ffn.32-v64-gb2-s1"
CASE = f"fsdp2-tp2-tensorwise-ag.fp8-{SMALL}"
ROWWISE = "tp2-rowwise-v2048-s1-b16"
ONE_ROW = """
import torch
import torch.distributed as dist

def one_row_scaled():
    stock = torch._scaled_mm

    def scaled_mm(a, b, scale_a, scale_b, *args, **kwargs):
        if dist.get_rank() == 1 and scale_b.numel() > 1:
            scale_b = scale_b.clone()
            scale_b[..., 0] *= 1.25
        return stock(a, b, scale_a, scale_b, *args, **kwargs)

    torch._scaled_mm = scaled_mm
"""
# Runs scripts as torchrun does, on ranks that are forked: torch is imported once. A request is a line of JSON.
FORKS = """
import json, os, runpy, signal, socket, sys, traceback
import functorch.compile, torch.distributed.fsdp, torch.distributed.tensor.parallel, torchao.float8

def rank(words):
    signal.alarm(240)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    code, sys.argv = 0, words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)

for line in sys.stdin:
    ranks, folder, words = json.loads(line)
    os.chdir(folder)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    children = []
    for number in range(ranks):
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
        children.append(os.fork())
        if children[-1] == 0:
            rank(words)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
"""
FIX = REPOSITORY / "cases" / "fixes" / "scale_of_whole_weight.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with every installed package but this one."""
    folder = tmp_path_factory.mktemp("without")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.suffix != ".pth" and not package.name.startswith(("harness", "fp8_harness", "__editable__")):
            (site / package.name).symlink_to(package)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def run(python: Path) -> Iterator[Run]:
    """Runs a script of so many ranks, with patches; the return code is 1 where that of a rank is not 0."""
    forks = [str(python), "-I", "-c", FORKS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(forks, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    requests, answers, runs = process.stdin, process.stdout, itertools.count()

    def one(script: Path, *patches: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
        folder = script.parent / f"run-{next(runs)}"
        folder.mkdir()
        words = [str(script), *patches]
        print(json.dumps([ranks, str(folder), words]), file=requests, flush=True)
        codes = json.loads(answers.readline())
        said, complained = ((folder / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(words, int(any(codes)), said, complained)

    yield one
    process.stdin.close()
    assert process.wait(timeout=30) == 0


@pytest.fixture
def bug_export(tmp_path: Path, warm: ForkServers) -> Run:
    """`bug export` of a case or bug of the harness, in a folder of the test's own."""

    def exported(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = ("--root", str(REPOSITORY), "--quiet", "bug", "export", *arguments, "--device", "cpu")
        return Command(tmp_path, {"FP8_HARNESS_PROGRAM": ""}, fork_servers=warm).call(*words)

    return exported


def test_the_script_fails_without_this_project_and_passes_with_the_fix(
    python: Path, run: Run, bug_export: Run, tmp_path: Path
) -> None:
    alone = subprocess.run([str(python), "-I", "-c", "import harness"], capture_output=True, text=True, check=False)
    assert "No module named 'harness'" in alone.stderr
    done = bug_export(f"{CASE}-f64", "--skip-proof", "--output", "issue")
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / "issue").glob("*.py")
    assert len(script.name) <= 45
    assert str(script.relative_to(tmp_path)) in done.stdout
    faulty = run(script)
    assert faulty.returncode == 1
    assert faulty.stdout.count(": FAULT: wrong numbers") >= 1, faulty.stderr
    fixed = run(script, f"{FIX}:apply")
    assert (fixed.returncode, fixed.stdout.count(": fixed")) == (0, 4), fixed.stderr
    draft = script.with_suffix(".md").read_text()
    assert draft.startswith("# scale does not match the amax: first for weight in all_gather of ")
    assert "\n- found: " in draft and "(float8 tensorwise, FSDP2, TP)\n" in draft
    assert "\n## Known\n" in draft and "unreported" not in draft
    assert f"torchrun --nproc-per-node 4 {script.name}" in draft


@pytest.mark.sweep  # the pytest files below find a fault and none in every run
def test_one_wrong_row_is_told_where_tp_ranks_add_bfloat16(run: Run, tmp_path: Path) -> None:
    """It moves whole gradients by as much as rounding does; of one linear it is eight times as much."""
    parity = FailureSignature(kind="parity/gradients", first_step=1)
    file, patch = tmp_path / "case.py", tmp_path / "patch.py"
    file.write_text(script(exported_case(parse_case_id(ROWWISE)), parity, title="one row").text)
    patch.write_text(ONE_ROW)
    clean = run(file, ranks=2)
    assert (clean.returncode, clean.stdout.count(": fixed")) == (0, 2), clean.stderr
    faulty = run(file, f"{patch}:one_row_scaled", ranks=2)
    assert (faulty.returncode, faulty.stdout.count(": FAULT: wrong numbers")) == (1, 2), faulty.stderr
    assert "expected  the output of layers.0.wq as of one rank, up to 0.012" in faulty.stdout


DRIVE = """
import os, runpy, sys
names = runpy.run_path(sys.argv[1])
for patch, _, function in (each.rpartition(":") for each in sys.argv[3:]):
    runpy.run_path(patch)[function]()
names["run_rank"](int(os.environ["RANK"]), sys.argv[2], names["check_gradients"])
"""
NO_REDUCTION = "amax_not_reduced_over_tp"


@pytest.mark.parametrize(
    ("case", "color", "patch"),
    [
        pytest.param(f"{CASE}-f64", "red", f"{FIX}:apply", id="a live fault and its fix", marks=pytest.mark.sweep),
        pytest.param(f"tp2-tensorwise-{SMALL}-f32", "green", NO_REDUCTION, id="a planted fault"),
    ],
)
def test_a_pytest_file_turns_with_its_patch(case: str, color: str, patch: str, run: Run, tmp_path: Path) -> None:
    """Red and green with the ranks that scripts have here: `test_pytest_files_are_proven` has pytest start them."""
    parity = FailureSignature(kind="parity/gradients", first_step=1)
    _, values = next(models(constants(exported_case(parse_case_id(case)), parity)))
    file, drive = tmp_path / "test_case.py", tmp_path / "drive.py"
    file.write_text(pytest_file(values, head='"""It fails."""'))
    drive.write_text(DRIVE)
    if patch == NO_REDUCTION:
        (tmp_path / "fault.py").write_text(exported_fault(patch))
        patch = f"{tmp_path / 'fault.py'}:{patch}"
    ranks = 4 if case.startswith("fsdp2") else 2
    colors = {"red": 1, "green": 0}
    for number, (patches, wanted) in enumerate([((), colors[color]), ((patch,), 1 - colors[color])]):
        done = run(drive, str(file), str(tmp_path / f"store{number}"), *patches, ranks=ranks)
        assert done.returncode == wanted, done.stderr
        assert ("tolerance 0.03, of which rounding explains 0.007" in done.stderr) == bool(wanted)


@pytest.mark.sweep  # every rank imports torch
@pytest.mark.parametrize("bug", ["ao-1938", "ao-3982", "ao-571", "async-tp-batch", "fp8-all-gather-tp-scale"])
def test_pytest_files_are_proven(bug: str, python: Path, bug_export: Run, tmp_path: Path) -> None:
    done = bug_export(bug, "--pytest")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("test_*.py")
    assert "now: red" in done.stdout
    words = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name]
    assert "1 failed" in subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False).stdout


@pytest.mark.sweep  # torchrun imports torch on every rank
def test_a_script_is_proven_by_torchrun(bug_export: Run, tmp_path: Path) -> None:
    done = bug_export(f"{CASE}-f64")
    assert done.returncode == 0, done.stdout + done.stderr
    (draft,) = tmp_path.glob("*.md")
    assert ": FAULT: wrong numbers" in draft.read_text()


def test_a_case_that_does_not_fail_is_refused(shared: Command) -> None:
    done = shared.call("-q", "bug", "export", "fsdp2-tensorwise-v2048-s3-f32-tol.0.05", "--device", "cpu")
    assert done.returncode == 2
    assert "it does not fail, so there is nothing to export" in done.stderr
