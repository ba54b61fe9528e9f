"""The commands that start no ranks."""

from __future__ import annotations

import json
import re
import sys

from tests.acceptance.conftest import REPOSITORY, Command


def test_list_imports_nothing_heavy(shared: Command) -> None:
    code = (
        "import sys; from harness.cli.main import main; code = main(['list', 'smoke']);"
        "print(code, sorted({'torch', 'numpy', 'rich', 'jsonschema', 'pytest'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {"PYTHONPATH": str(REPOSITORY), "HOME": str(shared.folder)}
    done = shared.process(sys.executable, "-c", code, env=environment)
    assert done.stderr.splitlines()[-1] == "0 []"


def test_list_into_a_closed_pipe(shared: Command) -> None:
    process = shared.start("list", "--json", "-")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_explain_values_and_coverage(project: Command) -> None:
    project.tier("grid", '[[matrix]]\nname = "m"\n[matrix.axes]\ntp = [1, 2, 3]\nrecipe = ["bf16", "rowwise"]\n')
    done = project.call("explain", "tp=3", "grid")
    assert done.returncode == 0, done.stderr
    assert "tp=3: 2 cells in grid" in done.stdout
    assert "excluded: 2 by" in done.stdout
    done = project.call("list", "grid", "--coverage", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert project.call("list", "grid", "--coverage").returncode == 0


def test_version(shared: Command) -> None:
    assert "fp8-harness" in shared.call("--version").stdout
    lines = {line.split()[0]: line.split() for line in shared.call("--version").stdout.splitlines()}
    assert lines["fp8-harness"][-1] == str(REPOSITORY / "harness")
    assert len(lines["torch"][2]) == 12 and lines["torch"][-1].endswith("/torch")
    assert "cpu" in lines


def test_the_cache_is_listed_and_cleared(project: Command) -> None:
    folder = project.folder / "state" / "references"
    kept = folder / "ab.msgpack"
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(b"x" * 2_000_000)
    assert any(
        line.startswith("references") and "2.0 MB" in line for line in project.call("runs", "list").stderr.splitlines()
    )
    assert "references removed: 1," in project.call("runs", "remove", "--references").stdout
    assert not kept.exists()
    assert "0.0 MB" in project.call("runs", "list").stderr


def test_explain_lists_the_words_of_ids_and_takes_a_case_apart(shared: Command) -> None:
    lines = [line.split(maxsplit=1) for line in shared.call("explain", "--list", "ids").stdout.splitlines()]
    assert ["tp4", "tensor parallelism over 4 ranks"] in lines
    assert any(line[:1] == ["ZeRO"] and "FSDP2 stands for stage 3" in line[1] for line in lines)
    done = shared.call("--root", str(REPOSITORY), "explain", "tp2-rowwise-v2048-f32")
    assert re.search("^  tp2 +tensor parallelism over 2 ranks$", done.stdout, re.MULTILINE)
    assert "estimated: from " in done.stdout and " GB in one process" in done.stdout
    own = shared.call("explain", "tp2-rowwise-v2048-f32")
    assert own.returncode == 0 and "estimated: from " in own.stdout  # by the costs that the harness measured
    assert shared.call("explain").returncode == 2
