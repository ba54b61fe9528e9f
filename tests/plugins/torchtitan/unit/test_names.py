"""A commit of torchtitan is known by the names in its sources, without importing it."""

from __future__ import annotations

import pytest

from harness.errors import HarnessError
from harness.plugins.torchtitan import names
from harness.plugins.torchtitan.names import Name, missing, used

TEXTS = {
    "torchtitan/a/__init__.py": "from .b import Config as Given, Made\nfrom torch import nn\n",
    "torchtitan/a/b.py": (
        "from torchtitan.c import Base\n"
        "first, second = 1, 2\n"
        "try:\n    class Made(Base):\n        class Config(Base.Config):\n            own: int = 1\n"
        "except ImportError:\n    Made = None\n"
        "class Config: ...\n"
        "def open_to_all(**options): ...\n"
        "class Outside(NamedTuple): ...\n"
    ),
    "torchtitan/c.py": "class Base:\n    class Config:\n        theirs: str\n",
}


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        (Name("torchtitan.a", "Made"), True),  # bound in another module
        (Name("torchtitan.a", "Given"), True),  # by another name
        (Name("torchtitan.a", "b"), True),  # a module
        (Name("torchtitan.a.b", "second"), True),
        (Name("torchtitan.a", "Config"), False),
        (Name("torchtitan.d", "Made"), False),
        (Name("torchtitan.a", "own", "Made.Config"), True),
        (Name("torchtitan.a", "theirs", "Made.Config"), True),  # of a base
        (Name("torchtitan.a", "gone", "Made.Config"), False),
        (Name("torchtitan.a.b", "any", "open_to_all"), True),
        (Name("torchtitan.a.b", "any", "Outside"), True),  # whose base is not known
    ],
)
def test_a_name_is_found_where_it_is_bound(name: Name, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "used", lambda: {name})
    assert missing(TEXTS.get) == ([] if is_there else [name])


def test_the_target_uses_options_and_imports() -> None:
    assert Name("torchtitan.trainer", "Trainer") in used()
    assert Name("torchtitan.config", "num_tokens_per_microbatch_per_dp_rank", "TrainingConfig") in used()
    assert len(missing(lambda _: None)) == len(used()) > 80


def test_what_is_installed_is_refused_by_the_first_name_that_it_lacks(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torchtitan"  # type: ignore[operator]
    folder.mkdir()
    monkeypatch.setattr(names, "package_paths", lambda _: [folder])
    monkeypatch.setattr(names, "installed_version", {"torch": "2.15.0+cpu", "torchtitan": "0.3.0"}.get)
    with pytest.raises(HarnessError, match=r"torchtitan 0\.3\.0 in .* lacks \d+ names that it uses, first torch"):
        names.require()
    monkeypatch.setattr(names, "installed_version", {"torch": "2.14.1", "torchtitan": "0.3.0"}.get)
    with pytest.raises(HarnessError, match=r"it needs torch 2\.15, not 2\.14\.1"):
        names.require()
