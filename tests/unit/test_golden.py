"""Goldens: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.evidence.golden import (
    Golden,
    changed_files,
    changes_between,
    compare_goldens,
    find_golden,
    golden_path,
    goldens_of,
    hardware_class,
    hardware_classes,
    list_goldens,
    load_golden,
    make_golden,
    source_commit,
    tree_commit,
    write_golden,
)
from harness.evidence.sealed import Damaged, Missing, read_sealed, write_sealed
from harness.trace import RankTrace, Run
from tests.builders import make_failure, make_trace, run_of
from tests.builders import make_golden as sound_golden
from tests.programs import make_commit, run_git

FAMILY = "tiny-v2048-s3-gb8-sl32-lr0.001-seed0"


def golden(losses: tuple[float, ...] = (7.5, 7.25, 7.1), **changes: object) -> Golden:
    return sound_golden(losses=losses, **{"family": FAMILY, "data_digest": "d1", **changes})


def trace(**changes: object) -> RankTrace:
    return make_trace(losses=(7.0, 6.0), software={"torch": "2.13.0", "numpy": "2.4"}, **changes)


def made(run: Run) -> Golden:
    return make_golden(run, family=FAMILY, case_id="c", command="cmd", reason="why", commit="abc")


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=6).filter(lambda pairs: len({p[0] for p in pairs}) > 1))
def test_writing_and_reading_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[float, float]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    losses, norms = zip(*pairs, strict=True)
    write_golden(root, golden(losses, grad_norms=norms))
    loaded = load_golden(root, "cpu", FAMILY)
    assert [value.hex() for value in loaded.losses] == [value.hex() for value in losses]
    assert [value.hex() for value in loaded.grad_norms] == [value.hex() for value in norms]


def test_the_file_is_indented_json_with_keys_in_a_stable_order_and_alone_in_its_folder(tmp_path: Path) -> None:
    text = write_golden(tmp_path, golden()).read_text()
    assert write_golden(tmp_path, golden()).read_text() == text
    assert text.startswith('{\n  "schema": 1,\n') and text.endswith("}\n")
    assert json.loads(text)["losses"] == [7.5, 7.25, 7.1]
    path = write_golden(tmp_path, golden())
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"7\.25", "7.26"),
        (r'"reason": "first one"', '"reason": "another"'),
        (r'"data_digest": "d1"', '"data_digest": "d2"'),
        (r'"digest": "\w{4}', '"digest": "0000'),
        (r'"digest": "\w+"', '"digest": ""'),
        (r'"schema": 1', '"schema": 2'),
        (r'"schema": 1,', ""),
        (r'"family"', '"famly"'),
        (r'"losses": \[', '"losses": ["NaN", '),
        (r"7\.1", "null"),
    ],
)
def test_an_edit_by_hand_is_found_and_named(tmp_path: Path, pattern: str, by: str) -> None:
    path = write_golden(tmp_path, golden())
    edited = re.sub(pattern, by, path.read_text(), count=1)
    assert edited != path.read_text()
    path.write_text(edited)
    with pytest.raises(Damaged) as caught:
        load_golden(tmp_path, "cpu", FAMILY)
    assert caught.value.where == str(path)
    assert "fp8-harness --root " in (caught.value.fix or "")


def test_goldens_of_another_schema_or_name_are_damaged(tmp_path: Path) -> None:
    write_sealed(golden_path(tmp_path, "cpu", FAMILY), golden(schema=2))
    with pytest.raises(Damaged, match="has schema 2, this version reads schema 1"):
        load_golden(tmp_path, "cpu", FAMILY)
    path = write_golden(tmp_path, golden())
    path.rename(path.with_name("other.json"))
    with pytest.raises(Damaged, match="copied or renamed"):
        load_golden(tmp_path, "cpu", "other")
    (tmp_path / "golden/nvidia-h200").mkdir()
    write_golden(tmp_path, golden()).rename(tmp_path / f"golden/nvidia-h200/{FAMILY}.json")
    with pytest.raises(Damaged, match="copied or renamed"):
        load_golden(tmp_path, "nvidia-h200", FAMILY)
    golden_path(tmp_path, "cpu", FAMILY).mkdir(parents=True)
    with pytest.raises(Damaged, match="cannot be read"):
        load_golden(tmp_path, "cpu", FAMILY)


def test_one_step_is_enough_for_a_golden(tmp_path: Path) -> None:
    write_golden(tmp_path, golden((7.5,)))
    assert load_golden(tmp_path, "cpu", FAMILY).losses == (7.5,)


def test_a_truncated_golden_is_found_at_every_length(tmp_path: Path) -> None:
    path = write_golden(tmp_path, golden())
    content = path.read_bytes().rstrip()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(Damaged):
            load_golden(tmp_path, "cpu", FAMILY)


@given(st.binary(max_size=80))
def test_any_bytes_are_damaged_and_nothing_worse(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = golden_path(tmp_path_factory.mktemp("root"), "cpu", FAMILY)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(Damaged):
        load_golden(path.parents[2], "cpu", FAMILY)


def test_other_white_space_is_no_damage(tmp_path: Path) -> None:
    path = write_golden(tmp_path, golden())
    path.write_text(path.read_text().replace("\n", "\r\n"))
    assert load_golden(tmp_path, "cpu", FAMILY).losses == (7.5, 7.25, 7.1)


def test_a_missing_golden_names_the_file_and_the_command(tmp_path: Path) -> None:
    for hardware, device in (("cpu", "cpu"), ("sm90", "cuda")):
        with pytest.raises(Missing) as caught:
            load_golden(tmp_path, hardware, FAMILY)
        assert f"{FAMILY}.json" in caught.value.text
        command = f"fp8-harness --root {tmp_path} baseline update single-bf16-v2048-s3-b16 --device {device} --reason"
        assert command in caught.value.text


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (golden(reason=""), "reason"),
        (golden(reason=" \n\t"), "reason"),
        (golden(reason='"…"'), "reason"),
        (golden(()), "0 losses"),
        (golden((7.0, 6.0), grad_norms=(1.0,)), "2 losses and 1"),
        (golden((7.0, math.nan)), "not finite"),
        (golden((7.0, math.inf)), "not finite"),
        (golden((7.0, 6.0), grad_norms=(1.0, math.nan)), "not finite"),
        (golden((7.0, 7.0, 7.0)), "never changes"),
        (golden(data_digest=""), "data digest"),
    ],
)
def test_what_must_not_be_stored(tmp_path: Path, refused: Golden, why: str) -> None:
    with pytest.raises(HarnessError, match=why):
        write_golden(tmp_path, refused)
    assert not list_goldens(tmp_path)


@pytest.mark.parametrize("family", ["", "../x", "a/b", ".hidden", "a b"])
def test_a_family_is_a_plain_file_name(tmp_path: Path, family: str) -> None:
    with pytest.raises(HarnessError, match="cannot name a golden"):
        load_golden(tmp_path, "cpu", family)


def test_a_device_without_a_name_has_no_class_and_no_two_vendors_share_one() -> None:
    with pytest.raises(HarnessError):
        hardware_class(" - ")
    assert not {*hardware_classes("NVIDIA H200", "sm90")} & {*hardware_classes("AMD Instinct MI300X", "gfx942"), "cpu"}


def test_listing_is_sorted_and_leaves_evidence_out(tmp_path: Path) -> None:
    assert list_goldens(tmp_path) == ()
    for hardware, family in (("nvidia-h200", "a"), ("cpu", "b"), ("cpu", "a")):
        device = "cpu" if hardware == "cpu" else "NVIDIA H200"
        made_on = replace(golden().provenance, device=device)
        write_golden(tmp_path, golden(hardware=hardware, family=family, provenance=made_on))
    (tmp_path / "golden/evidence").mkdir()
    (tmp_path / "golden/evidence/loss.json").write_text("{}")
    listed = [(key.hardware, key.family) for key in list_goldens(tmp_path)]
    assert listed == [("cpu", "a"), ("cpu", "b"), ("nvidia-h200", "a")]


def test_old_and_new_side_by_side() -> None:
    rows = compare_goldens(golden((7.0, 6.0, 5.0)), golden((7.0, 6.5)))
    assert [(row.step, row.old_loss, row.new_loss, row.loss_change) for row in rows] == [
        (1, 7.0, 7.0, 0.0),
        (2, 6.0, 6.5, 0.5),
        (3, 5.0, None, None),
    ]
    assert [(row.old_grad_norm, row.new_grad_norm) for row in rows] == [(1.0, 1.0), (2.0, 2.0), (3.0, None)]
    assert all(row.old_loss is None and row.old_grad_norm is None for row in compare_goldens(None, golden()))
    assert len(compare_goldens(None, golden())) == 3


def test_a_golden_is_made_of_one_finished_bf16_rank() -> None:
    new_golden = made(run_of(trace(device="NVIDIA H200")))
    assert (new_golden.hardware, new_golden.losses, new_golden.grad_norms) == ("nvidia-h200", (7.0, 6.0), (1.0, 1.0))
    assert list(new_golden.provenance.software.items()) == [("numpy", "2.4"), ("torch", "2.13.0")]
    assert (new_golden.provenance.reason, new_golden.provenance.commit) == ("why", "abc")


@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of(trace(), trace(rank=1)),
        run_of(trace(converted_fqns=("output",))),
        run_of(trace(calls=(0, 3))),
        run_of(trace(), make_failure(1)),
    ],
)
def test_other_runs_make_no_golden(run: Run) -> None:
    with pytest.raises(HarnessError, match="a golden"):
        made(run)


def test_without_git_the_commit_is_unknown(tmp_path: Path) -> None:
    assert tree_commit(tmp_path / "nowhere") == "unknown"


def committed(folder: Path, *names: str) -> Callable[..., None]:
    """Make `folder` a git repository with one commit of these files; returns a function that runs git there."""

    for name in names:
        (folder / name).write_text(name)
    if names:
        make_commit(folder, *names)
    else:
        run_git(folder, "init")
    return functools.partial(run_git, folder)


@pytest.mark.programs
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_says_when_files_differ_from_it(tmp_path: Path) -> None:
    committed(tmp_path)
    assert tree_commit(tmp_path) == "unknown"
    committed(tmp_path, "file")
    clean = tree_commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (tmp_path / "file").write_text("two")
    assert tree_commit(tmp_path) == f"{clean}-dirty"


@pytest.mark.programs
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_files_that_differ_from_the_commit_are_named(tmp_path: Path) -> None:
    assert changed_files(tmp_path / "nowhere") == ()
    git = committed(tmp_path, "one", "two words", "three")
    assert changed_files(tmp_path) == ()
    (tmp_path / "untracked").write_text("")
    assert changed_files(tmp_path) == (), "the commit is as clean without them"
    (tmp_path / "one").write_text("other")
    (tmp_path / "two words").unlink()
    (tmp_path / "three").write_text("staged")
    git("add", "three")
    assert changed_files(tmp_path) == ("one", "three", "two words")


def test_a_seal_is_renewed_by_the_tool_only(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    first = read_sealed(write_sealed(path, golden()), Golden, remake="")
    again = read_sealed(write_sealed(path, replace(first, data_digest="d2")), Golden, remake="")
    assert len(first.digest) == 64 and again.digest != first.digest


GPU = replace(golden().provenance, device="NVIDIA H200")
H200 = ("nvidia-h200", "sm90", "nvidia")


@pytest.mark.parametrize(
    ("device", "architecture", "classes"),
    [
        ("cpu", "", ("cpu",)),
        ("cpu", "sm90", ("cpu",)),
        ("NVIDIA A100-SXM4-80GB", "sm80", ("nvidia-a100-sxm4-80gb", "sm80", "nvidia")),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "sm90", ("nvidia-h100-80gb-hbm3-mig-3g-40gb", "sm90", "nvidia")),
        ("AMD Instinct MI355X", "", ("amd-instinct-mi355x", "amd")),
        ("NVIDIA H200", "sm90", H200),
        ("NVIDIA H200", "", ("nvidia-h200", "nvidia")),
        ("AMD Instinct MI300X", "gfx942", ("amd-instinct-mi300x", "gfx942", "amd")),
        ("AMD Instinct MI300X", "gfx90a", ("amd-instinct-mi300x", "gfx90a", "amd")),
        ("Other Device", "", ("other-device",)),
    ],
)
def test_the_classes_of_a_device_begin_with_the_most_specific(
    device: str, architecture: str, classes: tuple[str, ...]
) -> None:
    assert hardware_classes(device, architecture) == classes


def test_the_most_specific_golden_is_found(tmp_path: Path) -> None:
    for hardware in ("cpu", "amd", "gfx942"):
        source = golden().provenance if hardware == "cpu" else GPU
        write_golden(tmp_path, golden(hardware=hardware, provenance=source))
    with pytest.raises(Missing, match="nvidia-h200"):
        find_golden(tmp_path, H200, FAMILY)
    for hardware in reversed(H200):
        write_golden(tmp_path, golden(hardware=hardware, provenance=GPU))
        assert find_golden(tmp_path, H200, FAMILY).hardware == hardware
    golden_path(tmp_path, "nvidia-h200", FAMILY).write_text("{}")
    with pytest.raises(Damaged):
        find_golden(tmp_path, H200, FAMILY)


@pytest.mark.parametrize(
    ("hardware", "changes"),
    [
        ("cpu", {"device": "NVIDIA H200"}),
        ("sm90", {"device": "cpu"}),
        ("cpu", {"commit": ""}),
        ("cpu", {"created": ""}),
    ],
)
def test_a_provenance_that_cannot_be_is_refused(tmp_path: Path, hardware: str, changes: dict[str, str]) -> None:
    with pytest.raises(HarnessError, match="refused: it"):
        write_golden(tmp_path, golden(hardware=hardware, provenance=replace(golden().provenance, **changes)))


@pytest.mark.programs
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_goldens_are_read_from_a_revision_and_from_a_folder(tmp_path: Path) -> None:
    root = tmp_path / "repository" / "project"
    root.mkdir(parents=True)
    git = committed(root.parent, "file")
    (path := write_golden(root, golden())).parent.mkdir(exist_ok=True)
    git("add", "-A")
    git("commit", "-m", "goldens")
    path.unlink()
    write_golden(root, golden((7.5, 7.3, 7.1)))
    write_golden(root, golden(family=FAMILY.replace("seed0", "seed1")))
    assert changed_files(root) == () and source_commit(root) == tree_commit(root).removesuffix("-dirty")
    (root.parent / "file").write_text("other")
    assert changed_files(root) == ("file",) and source_commit(root).endswith("-dirty")
    with goldens_of(root, "HEAD") as old:
        changes, gone = changes_between(old, root)
    assert [change.kind for change in changes] == ["changed", "new"] and gone == ()
    with goldens_of(root, str(root)) as old:
        assert {change.kind for change in changes_between(old, root)[0]} == {"unchanged"}
    with goldens_of(root, "HEAD~1") as old:
        assert {change.kind for change in changes_between(old, root)[0]} == {"new"}
    for wrong in ("nothing", "--output=x", ""):
        with pytest.raises(HarnessError, match="neither a revision nor a project"), goldens_of(root, wrong):
            pass


def test_goldens_that_are_gone_are_named(tmp_path: Path) -> None:
    write_golden(tmp_path, golden())
    (key,) = changes_between(tmp_path, tmp_path / "other")[1]
    assert (key.hardware, key.family) == ("cpu", FAMILY)


STORED = sorted((Path(__file__).parents[2] / "golden" / "cpu").glob("*.json"))


def test_goldens_of_earlier_versions_are_read_and_written_to_the_same_bytes(tmp_path: Path) -> None:
    for path in STORED:
        loaded = load_golden(path.parents[2], "cpu", path.stem)
        assert write_golden(tmp_path, loaded).read_bytes() == path.read_bytes(), path.stem


def test_the_cpu_is_kept_with_a_golden(tmp_path: Path) -> None:
    provenance = replace(golden().provenance, cpu="Xeon avx2", limits="ATEN_CPU_CAPABILITY=avx2")
    write_golden(tmp_path, golden(provenance=provenance))
    assert load_golden(tmp_path, "cpu", FAMILY).provenance == provenance
