"""Bad input: named with file, tensor and byte, bounded, nothing executed, nothing written."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.plugins.handoff.library import judge
from harness.plugins.handoff.reading import read_state
from harness.plugins.handoff.safetensors import MOST_HEADER, read_file
from tests.plugins.handoff.files import by_row, content, source, stored, weights, write

GOOD = source(weights("a.weight", "b.weight"))
WHOLE = content(GOOD)
START = 8 + int.from_bytes(WHOLE[:8], "little")


def with_header(change: Callable[[dict[str, Any]], object], data: bytes = WHOLE[START:]) -> bytes:
    header = json.loads(WHOLE[8:START])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(name: str, **fields: Any) -> bytes:
    return with_header(lambda header: header[name].update(fields))


BROKEN: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("truncated", "empty")),
    "length alone": (WHOLE[:8], ("truncated", "the file has 8 bytes")),
    "cut in the header": (WHOLE[: START - 10], ("truncated",)),
    "cut in the data": (WHOLE[:-1], ("tensor b.weight ends at byte 2,", "truncated")),
    "cut before a tensor": (WHOLE[: START + 1024], ("tensor b.weight", "truncated")),
    "huge header": (MOST_HEADER.to_bytes(8, "little") + b"x" * 99, ("truncated", "104,857,600")),
    "no json": (WHOLE[:8] + b"?" * (START - 8) + WHOLE[START:], ("no JSON",)),
    "a list": (with_header(lambda _: []), ("no object",)),
    "deep": ((9999).to_bytes(8, "little") + b"[" * 9999, ("no JSON",)),
    "more data": (WHOLE + b"1234", ("4 bytes behind the last tensor",)),
    "unknown dtype": (entry("a.weight", dtype="F4"), ("tensor a.weight has dtype F4", "BF16")),
    "no dtype": (entry("a.weight", dtype=None), ("tensor a.weight has no dtype",)),
    "negative": (entry("a.weight", shape=[-8, 64]), ("tensor a.weight has no dtype",)),
    "true": (entry("a.weight", shape=[True, 64]), ("tensor a.weight has no dtype",)),
    "huge shape": (
        entry("a.weight", shape=[1 << 40, 1 << 40]),
        ("tensor a.weight", "needs 2,417,851,639,"),
    ),
    "other size": (entry("a.weight", shape=[8, 63]), ("tensor a.weight", "needs 1,008 bytes", "have 1,024")),
    "overlap": (entry("b.weight", data_offsets=[0, 1024]), ("tensor b.weight at byte", "overlaps a.weight")),
    "hole": (
        with_header(lambda header: header["b.weight"].update(data_offsets=[1025, 2049]), WHOLE[START:] + b"1"),
        ("tensor b.weight", "hole behind a.weight"),
    ),
    "named twice": (
        with_header(lambda _: None).replace(b'"b.weight"', b'"a.weight"'),
        ("its header is no JSON, or names something twice", "a.weight"),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_file_is_named_with_its_tensor_and_byte(what: str, tmp_path: Path) -> None:
    text, words = BROKEN[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(text)
    with pytest.raises(HarnessError) as raised:
        read_state(path)
    assert raised.value.where == str(path) and len(raised.value.text) < 600
    assert all(word in raised.value.text for word in words), raised.value.text


@given(st.data())
def test_whatever_the_bytes_are_it_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    at = data.draw(st.integers(0, START + 8))
    path.write_bytes(WHOLE[:at] + data.draw(st.binary(max_size=12)) + WHOLE[at + data.draw(st.integers(0, 12)) :])
    try:
        tensors = read_file(path)
    except HarnessError as error:
        assert error.where == str(path)
    else:
        assert all(np.asarray(held.parts[0].raw).size >= 0 for held in tensors)


def folder(tmp_path: Path, index: object = None, **files: Any) -> Path:
    for name, tensors in files.items():
        write(tmp_path / f"{name}.safetensors", tensors)
    if index is not None:
        text = index if isinstance(index, str) else json.dumps({"weight_map": index})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    return tmp_path


A, B = ({name: GOOD[name]} for name in GOOD)
TWICE = '{"weight_map": {"a.weight": "one.safetensors", "a.weight": "two.safetensors"}}'
ONE, TWO = "one.safetensors", "two.safetensors"


@pytest.mark.parametrize(
    ("index", "files", "words"),
    [
        ({"a.weight": ONE, "b.weight": TWO}, {"one": A}, ("shard two.safetensors is not in the folder", "b.weight")),
        (TWICE, {"one": A, "two": A}, ("names something twice", "a.weight")),
        ({"a.weight": ONE, "b.weight": ONE}, {"one": A}, ("tensor b.weight is not in one.safetensors",)),
        ({"a.weight": ONE, "b.weight": TWO}, {"one": GOOD, "two": B}, ("b.weight is in one.", "names it in two")),
        ({"a.weight": ONE}, {"one": GOOD}, ("tensor b.weight is in one.", "does not name it")),
        ({"a.weight": "../one.safetensors"}, {"one": A}, ("shard ../one.safetensors is not in the folder",)),
        ({"a.weight": 7}, {"one": A}, ("no weight_map",)),
        ("[]", {"one": A}, ("no object",)),
        (None, {"one": A, "two": GOOD}, ("tensor a.weight is in it twice", ONE, TWO)),
        (None, {}, ("no safetensors file",)),
    ],
)  # fmt: skip
def test_a_folder_that_contradicts_itself_is_named(index: object, files: Any, words: Any, tmp_path: Path) -> None:
    with pytest.raises(HarnessError) as raised:
        read_state(folder(tmp_path, index, **files))
    assert all(word in raised.value.text for word in words), raised.value.text


def test_a_folder_is_read_by_its_index_or_whole(tmp_path: Path) -> None:
    indexed = folder(tmp_path / "indexed", {"a.weight": ONE, "b.weight": TWO}, one=A, two=B)
    for path in (indexed, indexed / "model.safetensors.index.json", folder(tmp_path / "whole", one=A, two=B)):
        assert list(read_state(path).tensors) == ["a.weight", "b.weight"]


def test_files_of_ranks_are_put_together(tmp_path: Path) -> None:
    values = weights("a.weight", shape=(8, 64))["a.weight"]
    for rank in range(2):
        shard = {"a.weight": stored(values[rank * 4 : rank * 4 + 4], "BF16"), "norm.weight": stored(np.ones(4), "F32")}
        write(tmp_path / f"model-rank-{rank}-part-0.safetensors", shard)
    state = read_state(tmp_path)
    assert [held.shape for held in state.tensors.values()] == [(8, 64), (4,)]
    whole = write(
        tmp_path / "other" / "whole.safetensors",
        {"a.weight": stored(values, "BF16"), "norm.weight": stored(np.ones(4), "F32")},
    )
    assert judge(whole, tmp_path, format="high_precision").findings == ()


def test_shards_that_torch_writes_for_each_rank_know_their_offsets(tmp_path: Path) -> None:
    values = weights("a.weight", shape=(8, 64))["a.weight"]
    for rank in (1, 0):
        offsets = json.dumps({"a.weight": {"saved_offsets": [0, rank * 32]}})
        shard = {"a.weight": stored(values[:, rank * 32 : rank * 32 + 32], "BF16")}
        write(tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors", shard, {"DCP_SHARDING_INFO": offsets})
    held = read_state(tmp_path).tensors["a.weight"]
    assert held.shape == (8, 64)
    assert np.array_equal(held.read((slice(2, 5), slice(20, 40))), stored(values, "BF16")[1][2:5, 20:40])


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "a.ckpt"])
def test_a_pickle_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(HarnessError, match="may run code"):
        read_state(tmp_path / name)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


@pytest.mark.parametrize("value", [Evil(), {"state_dict_metadata": Evil()}, [1], b"\x80", None])
def test_nothing_in_a_checkpoint_is_run(value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
    with pytest.raises(HarnessError, match=r"no metadata of torch.distributed.checkpoint"):
        read_state(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_nothing_is_written(tmp_path: Path) -> None:
    values = weights("a.weight", "b.weight")
    write(tmp_path / "source.safetensors", source(values))
    write(tmp_path / "out" / "model.safetensors", by_row(values))

    def seen() -> dict[str, tuple[str, int]]:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}

    before = seen()
    for path in tmp_path.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert judge(tmp_path / "source.safetensors", tmp_path / "out", format="fp8_row").findings == ()
    assert seen() == before


LARGE = """
import resource, sys
from harness.plugins.handoff.library import judge
spent = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
most = spent + (100 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
judged = judge(sys.argv[1], sys.argv[2], format="fp8_row")
print(judged.values, len(judged.findings))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_DATA") or sys.platform != "linux", reason="the limit is Linux's")
def test_a_weight_that_is_larger_than_memory_is_compared_in_pieces(tmp_path: Path) -> None:
    """128 MiB of float32 beside float8, zeros that no disk holds, with 100 MiB of memory beyond the imports."""
    rows, columns = 8192, 4096
    for name, tensors in {
        "source": {"a.weight": ("F32", [rows, columns], 4)},
        "exported": {"a.weight_scale": ("F32", [rows, 1], 4), "a.weight": ("F8_E4M3", [rows, columns], 1)},
    }.items():
        at, header = 0, {}
        for tensor, (dtype, shape, size) in tensors.items():
            end = at + size * shape[0] * shape[1]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
    command = [
        sys.executable,
        "-c",
        LARGE,
        str(tmp_path / "source.safetensors"),
        str(tmp_path / "exported.safetensors"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split()[:2] == [str(rows * columns), "0"], done.stderr[-2000:]
