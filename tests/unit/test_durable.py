"""Files that survive an interruption."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from harness.durable import WriteFailed, append_line, write_whole

FULL = Path("/dev/full")


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a/b.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_written_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "a", []

    def fsync(handle: int) -> None:
        synced.append((os.pread(handle, 99, 0), path.read_bytes() if path.exists() else b""))

    monkeypatch.setattr(os, "fsync", fsync)
    append_line(path, b"one")
    write_whole(path, b"two")
    assert synced == [(b"one\n", b"one\n"), (b"two", b"one\n")], "a file is replaced when its new bytes are safe"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_clear_error() -> None:
    for write in (write_whole, append_line):
        with pytest.raises(WriteFailed, match=r"^/dev/full: cannot write: No space left on device"):
            write(FULL, b"x")


def test_a_file_in_place_of_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    for write in (write_whole, append_line):
        with pytest.raises(WriteFailed) as caught:
            write(tmp_path / "a/b", b"x")
        assert caught.value.where == str(tmp_path / "a/b")


def test_lines_grow_and_an_unfinished_one_is_closed_first(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, b"one")
    append_line(path, b"two")
    assert path.read_bytes() == b"one\ntwo\n"
    path.write_bytes(b"one\ntw")
    append_line(path, b"three")
    assert path.read_bytes() == b"one\ntw\nthree\n"
