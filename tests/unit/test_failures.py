"""What is said of a rank that failed, and of the stacks of ranks that hang."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.failures import STUCK, Frame, advice, failures, main_stack, own_frame, place_of
from harness.trace import RankFailure
from harness.verdict import Finding
from tests.builders import make_failure, make_trace, run_of

SITE = "/venv/lib/python3.11/site-packages"
Frames = list[tuple[str, int, str]]


def frames(*places: str) -> Frames:
    """Frames of "FILE LINE FUNCTION": files below the source of the harness, or below site-packages."""
    fields = [place.split() for place in places]
    folders = [SITE if file.startswith("torch") else "/src/harness" for file, _, _ in fields]
    return [(f"{folder}/{file}", int(line), name) for folder, (file, line, name) in zip(folders, fields, strict=True)]


ENGINE = frames("engine/rank.py 92 run_program", "engine/fork_server.py 108 _start")
TRAIN = frames(
    "torch/nn/modules/module.py 1778 _wrapped_call_impl",
    "worker/targets/reference/model.py 50 forward",
    "torch/nn/modules/module.py 1778 _wrapped_call_impl",
    "worker/training/train.py 115 forward_backward",
    "worker/main.py 57 rank_main",
)
TRAIN += ENGINE
FABRIC = frames(
    "worker/virtual/fabric.py 121 _futex",
    "worker/virtual/collectives.py 87 _exchange",
    "worker/virtual/collectives.py 181 _allreduce_",
    "torch/_ops.py 882 redispatch",
    "worker/dispatch_hooks/hook.py 45 hook",
)
CALLERS = frames(
    "torch/_ops.py 1279 __call__",
    "torch/distributed/_functional_collectives.py 179 all_reduce",
    "torch/distributed/tensor/placement_types.py 1534 _reduce_value",
    "torchao/float8/float8_utils.py 47 amax_to_scale",
    "worker/probes/operands.py 134 forward",
)
REDUCES = [*FABRIC, *CALLERS, *TRAIN]
AUTOGRAD = frames(
    "torch/distributed/tensor/_redistribute.py 1954 backward",
    "torch/autograd/function.py 325 apply",
    "torch/autograd/graph.py 979 _engine_run_backward",
    "torch/_tensor.py 623 backward",
)
BACKWARD = [*AUTOGRAD, *TRAIN[3:]]


def dump(stack: Frames, head: str = "Current thread 0x00007f08 (most recent call first):") -> str:
    """As faulthandler writes it."""
    return "\n".join([head, *(f'  File "{file}", line {line} in {function}' for file, line, function in stack)])


def place(stack: Frames) -> tuple[str, bool, list[str]]:
    location = place_of(main_stack(dump(stack)))
    assert location is not None
    return location.collective, location.backward, [str(call) for call in location.calls]


def test_a_rank_in_a_collective_has_its_name_or_that_of_its_kernel_and_what_called_it() -> None:
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
    name, backward, calls = place([*FABRIC, *BACKWARD])
    assert (name, backward) == ("allreduce", True)
    assert calls[1] == "forward_backward (harness/worker/training/train.py:115)"


def test_a_rank_in_no_collective_has_its_innermost_call_and_in_the_engine_no_place() -> None:
    assert place([("/home/me/patch.py", 12, "sleep"), *TRAIN]) == (
        "",
        False,
        ["sleep (/home/me/patch.py:12)", "forward (harness/worker/targets/reference/model.py:50)"],
    )
    _, _, calls = place([(f"{SITE}/torch/nn/functional.py", 7, "linear"), *TRAIN])
    assert calls[:2] == ["linear (torch/nn/functional.py:7)", "forward (harness/worker/targets/reference/model.py:50)"]
    assert "in no collective" in str(place_of(main_stack(dump(TRAIN))))
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
        stack = main_stack(file.read().decode())
    done.set()
    thread.join()
    assert stack[0].function == "test_what_this_python_dumps_is_read" and stack[0].file == __file__


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    place_of(main_stack(text))


SLEEPS = [("/home/me/patch.py", 12, "sleep"), *TRAIN]


def stuck(rank: int, stack: Frames | None) -> RankFailure:
    stacks = "" if stack is None else dump(stack)
    return make_failure(rank, "did not finish", kind="stuck", traceback=stacks)


def failures_of(*ends: RankFailure) -> list[Finding]:
    return list(failures(run_of(*ends), "hang"))


def ends(finding: Finding) -> str:
    return str(finding.values["end"])


def test_the_rank_that_nobody_waits_with_comes_first_and_says_what_the_others_do() -> None:
    first, others = failures_of(stuck(0, REDUCES), stuck(1, SLEEPS), stuck(2, REDUCES), stuck(3, REDUCES))
    assert ends(first) == (
        "stuck in step 1: in sleep (/home/me/patch.py:12), in no collective; ranks 0, 2-3 wait in all_reduce"
    )
    assert (first.rule, first.ranks, first.expected) == (STUCK.name, (1,), "every rank returns")
    assert (first.found or "").splitlines() == [
        "stuck in sleep (/home/me/patch.py:12),",
        "    called from forward (harness/worker/targets/reference/model.py:50)",
    ]
    assert (others.rule, others.ranks) == (STUCK.name, (0, 2, 3))
    assert ends(others).startswith("stuck in step 1: waiting in all_reduce, called from amax_to_scale")
    assert ";" not in ends(others)


def test_ranks_in_different_collectives_are_told_apart_fewest_first() -> None:
    first, second = failures_of(stuck(0, REDUCES), stuck(1, REDUCES), stuck(2, [*FABRIC, *BACKWARD]))
    assert ends(first).startswith("stuck in step 1, backward: waiting in allreduce")
    assert ends(first).endswith("; ranks 0-1 wait in all_reduce")
    assert (first.ranks, second.ranks) == ((2,), (0, 1))


@pytest.mark.parametrize("stack", [SLEEPS, None])
def test_the_limit_that_passed_is_named_with_how_to_raise_it(stack: Frames | None) -> None:
    (plain,) = failures_of(stuck(0, stack))
    assert plain.fix is None
    (finding,) = failures_of(replace(stuck(0, stack), message="did not finish within 130 s"))
    assert "130 s" in ends(finding)
    assert "`--timeout-s N`" in (finding.fix or "")


def test_ranks_that_returned_are_named_and_those_without_stacks_are_still_told() -> None:
    ranks = (stuck(0, REDUCES), stuck(1, REDUCES), make_trace(rank=2), make_trace(rank=3))
    (finding,) = failures(run_of(*ranks), "hang")
    assert ends(finding).endswith("; ranks 2-3 returned")
    (finding,) = failures_of(stuck(0, None), stuck(1, None))
    assert (finding.ranks, ends(finding)) == ((0, 1), "stuck in step 1: did not finish")
    assert finding.found == "stuck"
    stopped = make_failure(2, "stopped by a signal", kind="stopped")
    assert [reported.rank for reported in failures_of(stopped, stuck(0, REDUCES))] == [2, 0]


TRACEBACK = """Traceback (most recent call last):
  File "/opt/x/harness/worker/train.py", line 160, in train_step
    result = target.step(tuple(microbatches))
  File "/home/me/my_target.py", line 12, in step
    return self.loss(batch)
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 3, in cross_entropy
    raise ValueError("x")
ValueError: x
"""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ValueError: trying to initialize the default process group twice!", "remove dist.init_process_group()"),
        ("KeyError: 'LOCAL_RANK'", "dist.get_rank()"),
        ("AssertionError: Torch not compiled with CUDA enabled", "world.device"),
        ("RuntimeError: aten.mm: got mixed torch.Tensor and DTensor", "parameter group"),
        ("RuntimeError: Expected both dimensions of mat2 to be divisible by 16", "multiples of 16"),
        (
            "RuntimeError: Missing key in checkpoint state_dict: optimizer.param_groups.1.lr.",
            "flatten_optimizer_state_dict=True",
        ),
        ("ModuleNotFoundError: No module named 'mine'", "install it next to fp8-harness"),
        (
            "the fork server must be single-threaded to fork, but it also has: TMonitor",
            "tqdm.tqdm.monitor_interval = 0",
        ),
    ],
)
def test_known_errors_have_advice(error: str, words: str) -> None:
    what, fix = advice(error)
    assert what == error
    assert fix is not None and words in fix


def test_a_misfit_brings_its_own_advice_and_other_errors_have_none() -> None:
    assert advice("TargetMisfit: module x has no function `build`. Fix: define it.") == (
        "module x has no function `build`.",
        "define it.",
    )
    assert advice("ValueError: 7") == ("ValueError: 7", None)


def test_the_innermost_line_of_the_user_is_named() -> None:
    own = own_frame(TRACEBACK)
    assert own is not None and own.in_full == "/home/me/my_target.py:12 in step: return self.loss(batch)"
    assert own_frame('Traceback\n  File "/x/harness/worker/train.py", line 1, in f\n    x\n') is None
    (finding,) = failures(run_of(make_failure(traceback=TRACEBACK)), "crash")
    assert "ValueError: x, at /home/me/my_target.py:12 in step" in str(finding.values["end"])
