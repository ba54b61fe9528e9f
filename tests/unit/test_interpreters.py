"""Every version of Python: `make pythons` runs this folder with each that is here."""

import importlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_but_the_worker_can_be_imported() -> None:
    """Without torch and without a warning of deprecation, which the configuration of pytest makes an error."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "harness").rglob("*.py")]
    names = [".".join(path.with_suffix("").parts) for path in paths if not {"worker", "__main__.py"} & set(path.parts)]
    assert len(names) > 150
    for name in names:
        importlib.import_module(name.removesuffix(".__init__"))


def test_the_least_version_is_the_first_that_is_tested() -> None:
    minors = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("MINORS := "))
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert least == f">=3.{minors.split()[2]}"
