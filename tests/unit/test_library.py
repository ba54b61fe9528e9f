"""The library before any rank starts: what it refuses, what stands for a function, how it begins."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fp8_harness import assert_layouts_equal
from fp8_harness.builds import write_module
from fp8_harness.session import Session
from harness.checks.catalogue import MEASURED
from harness.errors import HarnessError
from harness.matrix.caseid import parse_case_id
from harness.running.plan import Plan
from tests.programs import run_script


def build(case: object, world: object) -> None: ...


def renamed(case: object, world: object) -> None: ...


original, renamed = renamed, lambda case, world: None


class Trainer:
    def method(self, case: object, world: object) -> None: ...


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda case, world: None, "<lambda> is a lambda, .*Fix: .* as `def build"),
        (functools.partial(build, 1), "is no function of a module, .*Fix: "),
        ("tests.unit.test_library", "is no function of a module, .*Fix: "),
        (Trainer.method, "Trainer.method is a method, .*Fix: .* as `def method"),
        (original, "renamed is something else than what was given.*Fix: "),
    ],
)
def test_what_ranks_cannot_import_is_a_type_error_with_a_fix(given: Any, words: str) -> None:
    def nested(case: object, world: object) -> None: ...

    with pytest.raises(TypeError, match=words):
        assert_layouts_equal(given, ["fsdp2"])

    class Nested: ...

    for local, form in ((nested, "def nested"), (Nested, "class Nested`")):
        with pytest.raises(TypeError, match=f"{local.__name__} is defined inside of a function.*`{form}"):
            assert_layouts_equal(local, ["fsdp2"])


@pytest.mark.parametrize(
    ("layouts", "axes", "words"),
    [
        ("fsdp2", {}, r'this is no list of layouts. Fix: write layouts=\["fsdp2"'),
        ([], {}, "this is no list of layouts"),
        (["fsdp2", "tq2"], {}, "'tq2'"),
        (["ddp2"], {}, r"layout ddp2: rule ddp_of_reference excludes it: .*\. Fix: .*change dp_replicate \(to 1"),
        (["fsdp2"], {"recipe": "rowwize"}, "did you mean rowwise"),
        (["fsdp2"], {"dtyp": "float64"}, "unknown axis 'dtyp'.*dtype"),
    ],
)
def test_bad_layouts_and_axes_are_errors(layouts: Sequence[str], axes: dict[str, Any], words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        assert_layouts_equal(build, layouts, **axes)


def test_a_module_stands_for_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports the function from any folder, and says something else where the sources change."""
    monkeypatch.setenv("FP8_HARNESS_STATE", str(tmp_path / "state"))
    (tmp_path / "code").mkdir()
    source = tmp_path / "code" / "some_trainer.py"
    source.write_text("class Trainer: ...\n")
    monkeypatch.syspath_prepend(str(source.parent))
    import some_trainer  # type: ignore[import-not-found]

    def text_for(function: Callable[..., Any]) -> tuple[str, str]:
        name = write_module(function)
        return name, (tmp_path / "state" / "builds" / f"{name}.py").read_text()

    name, text = text_for(some_trainer.Trainer)
    assert re.fullmatch("some_trainer_Trainer_[0-9a-f]{8}", name)
    code = f"import {name}; print({name}.build.__module__)"
    folder = tmp_path / "state" / "builds"
    printed = subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == "some_trainer"
    assert text_for(some_trainer.Trainer) == (name, text)
    source.write_text("class Trainer: pass\n")
    assert text_for(some_trainer.Trainer)[0] == name and text_for(some_trainer.Trainer)[1] != text


def test_too_many_ranks_are_a_skip() -> None:
    with pytest.raises(BaseException, match="needs 9 ranks, and this machine has room for 8") as raised:
        Session.check_ranks(9, 8)
    assert type(raised.value).__name__ == "SkipTest"


def test_ranks_record_nothing_that_no_check_reads() -> None:
    case, plan = parse_case_id("fsdp2-rowwise-v2048-s2-b16"), Plan(probed=True)
    probes = plan.probes_for(case)
    assert set(MEASURED) < set(probes)
    assert replace(plan, measures=False).probes_for(case) == tuple(of for of in probes if of not in MEASURED)


def test_importing_it_costs_nothing() -> None:
    code = (
        "import sys, fp8_harness, fp8_harness.ranks; print(sorted({'torch', 'harness', 'pytest'} & set(sys.modules)))"
    )
    assert run_script(code) == "[]"
