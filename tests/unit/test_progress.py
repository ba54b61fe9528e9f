"""What a person sees while cases run: bar, count and time at every width, and as much of the names as fits."""

import io
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.running.progress import LiveProgress, running_text

NAMES = (
    "hsdp2x2-tp2-tensorwise-tpstyle.fp8-dim.512-layers.4-ffn.1408-v2048-s3-b16",
    "fsdp2-tp2-tensorwise-tpstyle.fp8-ac.op-v2048-f64",
    "tp4-rowwise-v2048-f32",
)


@given(
    st.lists(st.text(st.characters(codec="ascii"), min_size=1, max_size=120), max_size=8, unique=True),
    st.integers(0, 200),
)
def test_the_names_fit_whatever_they_are(names: list[str], room: int) -> None:
    assert len(running_text(tuple(names), room)) <= room


def test_names_are_whole_where_there_is_room_then_shortened_then_counted() -> None:
    assert running_text(NAMES, 200) == "  ".join(NAMES)
    assert running_text(NAMES, 150)[:40] == "hsdp2x2-tp2-tensorwise-tpstyle.fp8-dim.5"
    assert running_text(NAMES, 70) == "hsdp2x2-tp2-ten…8-v2048-s3-b16  fsdp2-tp2-tenso…c.op-v2048-f64 +1 more"
    assert running_text(NAMES, 39) == "hsdp2x2-tp2-ten…08-v2048-s3-b16 +2 more"
    assert running_text(NAMES[2:], 39) == NAMES[2]
    assert running_text((), 39) == ""


@pytest.fixture
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("COLUMNS", str(request.param))
    yield request.param


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 120], indirect=True)
@pytest.mark.parametrize("jobs", [1, 4, 16])
def test_bar_count_and_time_stay_at_every_width(columns: int, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with LiveProgress(stream) as progress:
        progress.begin(470)
        for number in range(jobs):
            progress.started(f"{NAMES[0]}-seed{number}", 8)
        progress.finished(f"{NAMES[0]}-seed0", "line", remarkable=False)
        progress.note("a note that is longer than the terminal " * 5)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    frames = [line for line in re.split(r"[\r\n]+", plain) if "━" in line]
    assert frames and all(len(frame.rstrip()) < columns for frame in frames)
    assert all(re.search(r"━ +\d+/(470|\?) \d:\d\d:\d\d", frame) for frame in frames)
    if jobs > 4:
        assert any("more" in frame for frame in frames)
