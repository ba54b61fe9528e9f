"""When two environments are the same, and how a difference is told."""

from __future__ import annotations

import json
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.result import Environment
from harness.running.identity import environment
from harness.running.plan import Plan, make_plan
from harness.sources import is_editable
from tests.programs import make_commit

HERE = Environment(
    packages={"torch": "2.13.0", "torchao": "0.18.0"},
    contents={"torchao": "abc"},
    device="cpu",
    threads=2,
    commit="1234",
)
SEVERAL = {"packages", "contents", "targets", "injected", "threads"}
FIELDS = sorted(set(Environment.__struct_fields__) - SEVERAL - {"upstream"})  # which follows from the packages


@given(st.dictionaries(st.text(), st.text()), st.randoms())
def test_the_fingerprint_does_not_depend_on_the_order_of_packages(packages: dict[str, str], random: object) -> None:
    shuffled = list(packages.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = (replace(HERE, packages=installed, contents=installed) for installed in (packages, dict(shuffled)))
    assert one.fingerprint == other.fingerprint and one.differences(other) == ()


@pytest.mark.parametrize("name", FIELDS)
def test_any_field_changes_the_fingerprint_and_is_told(name: str) -> None:
    other = replace(HERE, **{name: "new"})
    assert other.fingerprint != HERE.fingerprint
    assert HERE.differences(other) == (f"{name} {getattr(HERE, name) or 'none'} -> new",)


def test_what_has_several_parts_is_told_by_part() -> None:
    packages = {"torchao": "0.19.0", "numpy": "2.4.0"}
    changes = {"packages": packages, "contents": {}, "targets": {"mine": "d"}, "injected": ("f.py:g e",), "threads": 4}
    assert HERE.differences(replace(HERE, **changes)) == (
        "torch 2.13.0 -> none",
        "torchao 0.18.0 -> 0.19.0",
        "torchao sources abc -> none",
        "threads 2 -> 4",
        "numpy none -> 2.4.0",
        "mine sources none -> d",
        "injected none -> f.py:g e",
    )
    for name, value in changes.items():
        assert replace(HERE, **{name: value}).fingerprint != HERE.fingerprint


# What is found on this machine


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("FP8_HARNESS_PROGRAM", "tests.acceptance.fake_program")
    return make_plan(device="cpu")


def test_it_is_the_same_twice_and_names_what_is_there(plan: Plan, tmp_path: Path) -> None:
    current = environment(plan, tmp_path)
    assert current == environment(plan, tmp_path)
    assert {"fp8-harness", "numpy", "python"} <= current.packages.keys()
    assert (current.device, current.driver, current.launcher, current.backend) == ("cpu", "", "fork", "shared")
    assert current.threads > 0 and current.commit == "unknown"
    assert str(tmp_path) not in repr(current)


def test_the_commit_and_every_change_of_it_count(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "case.toml"
    file.write_text("a")
    make_commit(tmp_path, ".")
    clean = environment(plan, tmp_path)
    assert len(clean.commit) == 40 and clean.changes == ""
    changed = []
    for text in ("b", "c"):
        file.write_text(text)
        changed.append(environment(plan, tmp_path))
    assert all(variant.commit == f"{clean.commit}-dirty" for variant in changed)
    assert len({variant.fingerprint for variant in (clean, *changed)}) == 3


def test_a_target_of_the_users_own_counts_by_its_source(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("a = 1\n")
    first = environment(plan, tmp_path, ("reference", "mine"))
    assert first.targets.keys() == {"mine"}
    (tmp_path / "mine.py").write_text("a = 2\n")
    assert environment(plan, tmp_path, ("mine",)).targets != first.targets


def test_an_injection_counts_by_its_name_and_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8_HARNESS_PROGRAM", "tests.acceptance.fake_program")
    monkeypatch.chdir(tmp_path)
    patch = tmp_path / "patch.py"
    patch.write_text("def apply(): pass\n")
    near, far = (
        environment(make_plan(device="cpu", inject=(text,)), tmp_path) for text in ("patch.py:apply", f"{patch}:apply")
    )
    assert near == far and near.injected[0].startswith("patch.py:apply ")
    patch.write_text("def apply(): return 1\n")
    assert environment(make_plan(device="cpu", inject=("patch.py:apply",)), tmp_path).injected != near.injected


@pytest.mark.parametrize(
    ("direct_url", "editable"),
    [
        (None, False),
        ("", False),
        ("[]", False),
        (json.dumps({"url": "file:///x", "dir_info": {}}), False),
        (json.dumps({"url": "file:///x", "dir_info": {"editable": True}}), True),
    ],
)
def test_an_editable_install_is_told(tmp_path: Path, direct_url: str | None, editable: bool) -> None:
    folder = tmp_path / "x-1.dist-info"
    folder.mkdir()
    if direct_url is not None:
        (folder / "direct_url.json").write_text(direct_url)
    assert is_editable(PathDistribution(folder)) is editable
