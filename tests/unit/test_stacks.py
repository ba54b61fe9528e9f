"""Stacks that faulthandler dumped: where a rank is, and what of a stack tells it."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

from hypothesis import given
from hypothesis import strategies as st

from harness.checks.stacks import Frame, main_stack, place_of

SITE = "/venv/lib/python3.11/site-packages"
ENGINE = [("/src/harness/engine/rank.py", 92, "run_program"), ("/src/harness/engine/zygote.py", 108, "_start")]
TRAIN = [
    (f"{SITE}/torch/nn/modules/module.py", 1778, "_wrapped_call_impl"),
    ("/src/harness/worker/targets/reference/model.py", 50, "forward"),
    (f"{SITE}/torch/nn/modules/module.py", 1778, "_wrapped_call_impl"),
    ("/src/harness/worker/train.py", 115, "forward_backward"),
    ("/src/harness/worker/main.py", 57, "rank_main"),
    *ENGINE,
]
FABRIC = [
    ("/src/harness/worker/virtual/fabric.py", 121, "_futex"),
    ("/src/harness/worker/virtual/collectives.py", 87, "_exchange"),
    ("/src/harness/worker/virtual/collectives.py", 181, "_allreduce_"),
    (f"{SITE}/torch/_ops.py", 882, "redispatch"),
    ("/src/harness/worker/dispatch_hooks/hook.py", 45, "hook"),
]
REDUCES = [
    *FABRIC,
    (f"{SITE}/torch/_ops.py", 1279, "__call__"),
    (f"{SITE}/torch/distributed/_functional_collectives.py", 179, "all_reduce"),
    (f"{SITE}/torch/distributed/tensor/placement_types.py", 1534, "_reduce_value"),
    (f"{SITE}/torchao/float8/float8_utils.py", 47, "amax_to_scale"),
    ("/src/harness/worker/probes/operands.py", 134, "forward"),
    *TRAIN,
]
BACKWARD = [
    (f"{SITE}/torch/distributed/tensor/_redistribute.py", 1954, "backward"),
    (f"{SITE}/torch/autograd/function.py", 325, "apply"),
    (f"{SITE}/torch/autograd/graph.py", 979, "_engine_run_backward"),
    (f"{SITE}/torch/_tensor.py", 623, "backward"),
    *TRAIN[3:],
]


def dump(frames: list[tuple[str, int, str]], head: str = "Current thread 0x00007f08 (most recent call first):") -> str:
    """As faulthandler writes it."""
    return "\n".join([head, *(f'  File "{file}", line {line} in {function}' for file, line, function in frames)])


def place(frames: list[tuple[str, int, str]]) -> tuple[str, bool, list[str]]:
    found = place_of(main_stack(dump(frames)))
    assert found is not None
    return found.collective, found.backward, [str(call) for call in found.calls]


def test_a_rank_in_a_collective_has_its_name_and_what_called_it() -> None:
    assert place(REDUCES) == (
        "all_reduce",
        False,
        [
            "all_reduce (torch/distributed/_functional_collectives.py:179)",
            "amax_to_scale (torchao/float8/float8_utils.py:47)",
            "forward (harness/worker/targets/reference/model.py:50)",
        ],
    )
    assert str(place_of(main_stack(dump(REDUCES)))) == (
        "waiting in all_reduce, called from amax_to_scale (torchao/float8/float8_utils.py:47)"
    )


def test_a_collective_that_c10d_calls_has_the_name_of_its_kernel() -> None:
    name, backward, calls = place([*FABRIC, *BACKWARD])
    assert (name, backward) == ("allreduce", True)
    assert calls[1] == "forward_backward (harness/worker/train.py:115)"


def test_a_rank_in_no_collective_has_its_innermost_call() -> None:
    assert place([("/home/me/patch.py", 12, "sleep"), *TRAIN]) == (
        "",
        False,
        ["sleep (/home/me/patch.py:12)", "forward (harness/worker/targets/reference/model.py:50)"],
    )
    _, _, calls = place([(f"{SITE}/torch/nn/functional.py", 7, "linear"), *TRAIN])
    assert calls[:2] == ["linear (torch/nn/functional.py:7)", "forward (harness/worker/targets/reference/model.py:50)"]
    assert "in no collective" in str(place_of(main_stack(dump(TRAIN))))


def test_a_stack_of_the_engine_alone_is_no_place() -> None:
    assert place_of(main_stack(dump(ENGINE))) is None
    assert place_of(main_stack("")) is None
    assert place_of(main_stack("nothing")) is None


def test_the_main_thread_is_the_last_and_output_is_no_stack() -> None:
    other = dump([("/x.py", 1, "worker")], "Thread 0x01 (most recent call first):")
    printed = dump([("/y.py", 2, "printed")])
    assert main_stack(f"{other}\n\n{dump(TRAIN)}\nlast output:\n{printed}")[0] == Frame(*TRAIN[0])
    assert main_stack(f"Fatal Python error: Segmentation fault\n\n{dump(TRAIN)}\n\nExtension modules: x")[1:] == tuple(
        Frame(*frame) for frame in TRAIN[1:]
    )


def test_what_this_python_dumps_is_read() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        frames = main_stack(file.read().decode())
    done.set()
    thread.join()
    assert frames[0].function == "test_what_this_python_dumps_is_read" and frames[0].file == __file__


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    place_of(main_stack(text))
