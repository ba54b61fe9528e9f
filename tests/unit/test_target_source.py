"""Targets are found without being imported, and everything they are made of is part of the key of their witnesses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.hints import INSTALL_TORCHTITAN
from harness.running import identity
from harness.running.identity import check_targets, search_path, target_digest
from harness.sources import source_digest


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def digest(target: str, root: Path) -> str:
    target_digest.cache_clear()
    return target_digest(target, root)


def write(path: Path, text: str = "def build(case, world): ...\nraise AssertionError('imported')\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("file", ["mine.py", "mine/__init__.py"])
def test_a_target_is_found_in_the_project_and_never_imported(tmp_path: Path, file: str) -> None:
    root = tmp_path / "project"
    write(root / file)
    check_targets(["mine", "reference"], root)
    assert digest("mine", root)
    assert str(root) in search_path(root)


def test_a_module_inside_of_a_package_is_found_by_its_dotted_name(tmp_path: Path) -> None:
    write(tmp_path / "mine" / "__init__.py")
    write(tmp_path / "mine" / "deep" / "__init__.py")
    write(tmp_path / "mine" / "deep" / "target.py")
    check_targets(["mine.deep.target"], tmp_path)
    for missing in ("mine.target", "mine.deep.other", "mine.deep.target.more", "other"):
        with pytest.raises(HarnessError, match=f"there is no module {missing}") as raised:
            check_targets([missing], tmp_path)
        assert str(tmp_path) in (raised.value.fix or "")
    write(tmp_path / "mine" / "Amine.py", "")
    write(tmp_path / "mine" / "__init__.py")
    check_targets(["mine"], tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "def train(): ...\nif __name__ == '__main__':\n    train()\n",
        "class Builder:\n    def build(self): ...\n",
        "print(build)\n",
        "",
    ],
)
def test_a_script_without_build_is_refused_before_ranks_start(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "train.py", text)
    with pytest.raises(HarnessError, match="module train has no function `build`") as raised:
        check_targets(["train"], tmp_path)
    assert raised.value.where == str(file)


@pytest.mark.parametrize(
    "text",
    [
        "from mine import build\n",
        "from mine import make as build\n",
        "from mine import *\n",
        "try:\n    import mine\nexcept ImportError:\n    build = None\nelse:\n    build = mine.build\n",
        "if True:\n    def build(case, world): ...\n",
        "def __getattr__(name): ...\n",
        "def (",
    ],
)
def test_a_module_that_may_have_build_is_left_to_the_ranks(tmp_path: Path, text: str) -> None:
    write(tmp_path / "mine.py", text)
    check_targets(["mine"], tmp_path)


@pytest.mark.plugin("torchtitan")
def test_a_built_in_target_needs_its_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "installed_version", lambda _: None)
    with pytest.raises(HarnessError, match="torchtitan is not installed") as raised:
        check_targets(["torchtitan"], tmp_path)
    assert raised.value.fix == INSTALL_TORCHTITAN


def test_every_file_of_the_package_of_a_target_counts(tmp_path: Path) -> None:
    write(tmp_path / "mine" / "__init__.py", "")
    write(tmp_path / "mine" / "target.py", "from mine import model\n")
    model = write(tmp_path / "mine" / "model.py", "width = 1\n")
    first = digest("mine.target", tmp_path)
    assert digest("mine.target", tmp_path) == first
    model.write_text("width = 2\n")
    assert digest("mine.target", tmp_path) != first


@pytest.mark.parametrize("text", ["import trainer\n", "def build(case, world):\n    from trainer import loop\n"])
@pytest.mark.parametrize("file", ["trainer.py", "trainer/loop.py"])
def test_what_a_target_imports_counts_too(tmp_path: Path, text: str, file: str) -> None:
    write(tmp_path / "mine.py", text)
    trainer = write(tmp_path / file, "steps = 1\n")
    write(tmp_path / "unused.py", "steps = 1\n")
    first = digest("mine", tmp_path)
    write(tmp_path / "unused.py", "steps = 12\n")
    assert digest("mine", tmp_path) == first
    os.utime(trainer, (1, 1))  # a fresh checkout
    assert digest("mine", tmp_path) == first
    trainer.write_text("steps = 2\n")  # as long as before
    os.utime(trainer, (1, 1))
    assert digest("mine", tmp_path) != first


def test_a_target_that_is_no_python_has_a_digest_and_the_reference_has_none(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", "def build(:\n")
    assert digest("mine", tmp_path)
    assert digest("reference", tmp_path) == ""


@pytest.mark.plugin("torchtitan")
def test_what_drives_a_named_target_is_part_of_its_digest(tmp_path: Path) -> None:
    folder = Path(identity.__file__).parents[1] / "plugins" / "torchtitan" / "worker"
    assert digest("torchtitan", tmp_path).endswith(source_digest(folder, folder.rglob("*.py")))
