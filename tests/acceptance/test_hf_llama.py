"""The Llama of Hugging Face transformers, `examples/hf_llama`: every layout passes, where transformers is installed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.acceptance.conftest import REPOSITORY, Command

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


@pytest.mark.sweep
def test_every_layout_of_the_llama_of_transformers_passes(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "examples" / "hf_llama", tmp_path, dirs_exist_ok=True)
    done = Command(tmp_path).run("run", "--device", "cpu", "--quiet", timeout_s=600)
    assert done.returncode == 0 and "8 cases: 8 passed" in done.stdout, done.stdout + done.stderr
