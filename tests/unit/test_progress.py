"""What a person sees while cases run: bar, count and time at every width, and as much of the names as fits."""

import io
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.running.progress import LiveProgress, PlainProgress, Work, running_text

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


def test_names_are_whole_where_there_is_room_else_the_first_is_shortened_and_others_are_counted() -> None:
    assert running_text(NAMES, 200) == "  ".join(NAMES)
    assert running_text(NAMES, 140) == "  ".join(NAMES[:2]) + " +1 more"
    assert running_text(NAMES, 39) == "hsdp2x2-tp2-ten…08-v2048-s3-b16 +2 more"
    assert running_text(NAMES[2:], 39) == NAMES[2]
    assert running_text((), 39) == ""


def test_the_phase_is_that_of_what_runs_and_the_rest_is_told_at_the_pace_of_this_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    work = Work(4, references=["r"], costs={"r": 1.0, "a": 2.0, "b": 2.0, "c": 4.0}, jobs=1)
    work.start("r")
    assert work.phase == "references 0/1" and work.left() == ""
    now_s = 20.0  # of imports
    assert work.finish("r") == "references 1/1" and work.left() == ""
    work.start("a")
    now_s = 30.0
    assert work.finish("a") == "cases 1/3" and work.left() == "~30 s left"
    work.start("c")
    now_s = 45.0
    assert work.phase == "cases 1/3" and work.left() == "~20 s left"
    unknown = Work(2, costs={"a": 1.0})
    unknown.start("b")
    unknown.finish("b")
    unknown.start("a")
    assert unknown.left() == ""


def test_a_log_has_phases_and_neutral_colors_stand_for_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    plain = PlainProgress(stream)
    plain.begin(2, references=["r"])
    for name in ("r", "a"):
        plain.started(name, 1)
        plain.finished(name, f"done {name}", remarkable=False)
    assert stream.getvalue() == "[references 1/1] done r\n[cases 1/1] done a\n"
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    with LiveProgress(terminal) as live:
        live.begin(2)
        live.started("a", 1)
        live.finished("a", "line", remarkable=False)
    assert not re.search(r"\x1b\[[0-9;]*(?<![0-9])(31|32|33|91|92|93)m", terminal.getvalue())


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
    assert all(re.search(r"━ cases \d+/(470|0) \d:\d\d:\d\d", frame) for frame in frames)
    if jobs > 4:
        assert any("more" in frame for frame in frames)
