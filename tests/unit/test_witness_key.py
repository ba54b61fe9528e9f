"""The key of kept witnesses: it changes with all that computes a witness, and with nothing else."""

import base64
import os
import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from harness.engine.hardware import Capacity, NodeCapacity
from harness.running.identity import witness_key
from harness.running.plan import Plan
from harness.sources import installed_source

PLAN = Plan(probed=True)
CPUINFO = """\
processor	: 0
model name	: AMD EPYC 9R14
cpu MHz		: 2600.000
flags		: fpu avx2 avx512f

processor	: 1
model name	: AMD EPYC 9R14
cpu MHz		: 3100.000
flags		: fpu avx2 avx512f
"""


def write_package(folder: Path, name: str) -> Path:
    """A package with one module in a subfolder; returns the file of the module."""
    module = folder / name / "deep" / "module.py"
    module.parent.mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / name / "deep" / "__init__.py").write_text("raise AssertionError('imported')\n")
    module.write_text("scale = 1.0\n")
    return module


@pytest.fixture(autouse=True)
def small_packages(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch, a torchao and a numpy of three files each, in place of the installed ones with their thousands.

    Not imported, as in the controller, whatever other tests of this process imported.
    """
    folder = tmp_path_factory.mktemp("installed")
    for name in ("torch", "torchao", "numpy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        write_package(folder, name)
    monkeypatch.syspath_prepend(folder)


def test_the_arithmetic_fabric_cpus_and_program_change_it() -> None:
    other = Plan(probed=True, arithmetic="kernel")
    assert witness_key(other) != witness_key(PLAN)
    assert witness_key(replace(PLAN, backend="gloo")) != witness_key(PLAN)
    node = NodeCapacity(host="a", slots=4, device="cpu", device_name="cpu", cpu="EPYC 9R14")
    other = msgspec.structs.replace(node, host="b", cpu="Xeon 8488C")
    keys = [
        witness_key(msgspec.structs.replace(PLAN, capacity=Capacity(nodes=nodes))) for nodes in ((node,), (node, other))
    ]
    assert keys[0] != keys[1]
    assert witness_key(Plan(program="no_such_program")) != witness_key(PLAN)


@pytest.mark.parametrize("name", ["torch", "torchao"])
def test_an_installed_package_that_is_edited_in_place_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = write_package(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    first = witness_key(PLAN)
    assert witness_key(PLAN) == first
    (module.parent / "notes.txt").write_text("no code")
    (module.parent / "__pycache__").mkdir()
    (module.parent / "__pycache__" / "module.py").write_text("")
    assert witness_key(PLAN) == first
    module.write_text("scale = 2.0\n")  # as long as before
    edited = witness_key(PLAN)
    assert edited != first
    for library in ("kernels.so", "libtorch.so.2"):
        (module.parent / library).write_bytes(b"\x7fELF")
        assert witness_key(PLAN) != edited
        edited = witness_key(PLAN)
    assert name not in sys.modules


def install(folder: Path, *, at_s: int) -> Path:
    """A torch with a library, and the RECORD that an installer writes after its files; returns one of these."""
    module = write_package(folder, "torch")
    library = module.parent / "kernels.so"
    library.write_bytes(b"\x7fELF")
    info = folder / "torch-1.0.dist-info"
    info.mkdir()
    hashes = {path: base64.urlsafe_b64encode(sha256(path.read_bytes()).digest()) for path in (module, library)}
    lines = [
        f"{path.relative_to(folder)},sha256={digest.decode().rstrip('=')},{path.stat().st_size}\n"
        for path, digest in hashes.items()
    ]
    (info / "RECORD").write_text(f"{''.join(lines)}torch/__init__.py,,\n")
    for path in (*module.parents[1].rglob("*"), info / "RECORD"):
        os.utime(path, (at_s, at_s))
    return module


def keys_of(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> list[str]:
    """The key with each of them in front."""
    keys = []
    for folder in folders:
        with monkeypatch.context() as patched:
            patched.syspath_prepend(folder)
            keys.append(witness_key(PLAN))
    return keys


def test_another_installation_of_the_same_files_elsewhere_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, edited = tmp_path / "one", tmp_path / "other", tmp_path / "edited"
    install(one, at_s=1)
    again = install(other, at_s=2)
    module = install(edited, at_s=2)
    module.write_text("scale = 2.0\n")
    first, second, third = keys_of(monkeypatch, one, other, edited)
    assert first == second != third
    module.write_text("scale = 1.0\n")  # after RECORD, so it is read
    os.utime(again.parent / "kernels.so")  # like a copy of the environment without times
    assert keys_of(monkeypatch, edited, other) == [first, first]


def test_what_is_as_it_was_installed_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(tmp_path, at_s=1)
    (first,) = keys_of(monkeypatch, tmp_path)
    for text, at_s in (("scale = 2.0\n", 1), ("scale = 20.0\n", 1), ("scale = 2.0\n", 2)):
        module.write_text(text)
        os.utime(module, (at_s, at_s))
        is_seen = keys_of(monkeypatch, tmp_path) != [first]
        assert is_seen == (at_s == 2 or "20" in text)


def test_a_library_of_no_installer_counts_by_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = write_package(tmp_path, "torch").with_name("built.so")
    library.write_bytes(b"\x7fELF")
    first = keys_of(monkeypatch, tmp_path)
    os.utime(library, (1, 1))
    assert keys_of(monkeypatch, tmp_path) != first


@pytest.mark.parametrize("name", ["my_ranks", "my_package.deep.module"])
def test_the_source_of_a_rank_program_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = tmp_path / "my_ranks.py" if name == "my_ranks" else write_package(tmp_path, "my_package")
    module.write_text("scale = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan = Plan(program=name)
    first = witness_key(plan)
    os.utime(module, ns=(1, 1))
    assert witness_key(plan) == first, "by content: a new checkout makes nothing stale"
    module.write_text("scale = 2.0\n")
    assert witness_key(plan) != first
    assert name.partition(".")[0] not in sys.modules


def test_a_module_beside_the_rank_program_changes_it_and_one_that_cannot_be_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_package(tmp_path, "my_package")
    monkeypatch.syspath_prepend(tmp_path)
    plan = Plan(program="my_package.deep.module")
    first = witness_key(plan)
    (module.parent / "helper.py").write_text("")
    assert witness_key(plan) != first
    (module.parent / ".#module.py").symlink_to("nowhere")
    assert witness_key(plan)


def test_the_processor_changes_it_and_its_clock_does_not(tmp_path: Path) -> None:
    keys = []
    for text in (
        CPUINFO,
        CPUINFO.replace("2600", "1500"),
        CPUINFO.replace("9R14", "7R13"),
        CPUINFO.replace(" avx512f", ""),
        "Features	: fp asimd sve\nCPU part	: 0xd40\n",
        "Features	: fp asimd sve\nCPU part	: 0xd4f\n",
        "",
    ):
        (tmp_path / "cpuinfo").write_text(text)
        keys.append(witness_key(PLAN, cpuinfo=tmp_path / "cpuinfo"))
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1
    assert witness_key(PLAN, cpuinfo=tmp_path / "nowhere") == keys[-1]


def test_the_source_of_a_package_is_its_python_files_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_package(tmp_path / "here", "edited")
    monkeypatch.syspath_prepend(tmp_path / "here")
    before = installed_source("edited")
    assert before is not None and before.folder == (tmp_path / "here" / "edited")
    os.utime(module)  # an install of the same sources
    assert installed_source("edited") == before
    module.write_text("scale = 2.0\n")
    after = installed_source("edited")
    assert after is not None and after.digest != before.digest
    assert installed_source("no_such_package") is None
