"""The Llama of Hugging Face transformers, `examples/hf_llama`: every layout passes. `make transformers` runs this."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.acceptance.conftest import REPOSITORY, Command

if importlib.util.find_spec("transformers") is None:
    why = "transformers is no part of the extra `dev`: `make transformers` runs this file in an environment that has it"
    pytest.skip(why, allow_module_level=True)


@pytest.mark.sweep
def test_every_layout_of_the_llama_of_transformers_passes(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "examples" / "hf_llama", tmp_path, dirs_exist_ok=True)
    done = Command(tmp_path).run("--quiet", "run", "--device", "cpu", timeout_s=600)
    assert done.returncode == 0 and "8 cases: 8 passed" in done.stdout, done.stdout + done.stderr
