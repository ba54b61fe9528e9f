"""Which program the command of `exec` is."""

from pathlib import Path

import pytest

from harness.plugins.exec.request import program_of


def test_a_program_of_this_environment_is_found_without_activating_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
        for name in ("accelerate", "python", *(["tune"] if folder == "elsewhere" else [])):
            (tmp_path / folder / name).touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "here" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert program_of("accelerate") == str(tmp_path / "here" / "accelerate")
    assert program_of("tune") == str(tmp_path / "elsewhere" / "tune") and program_of("axolotl") is None
