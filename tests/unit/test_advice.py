"""Errors that targets often run into come with what to do, and with the line of the user that raised them."""

from __future__ import annotations

import pytest

from harness.checks.failures import advice, failures
from harness.checks.stacks import own_frame
from tests.builders import make_failure, run_of

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
        ("ValueError: trying to initialize the default process group twice!", "leave out dist.init_process_group()"),
        ("KeyError: 'LOCAL_RANK'", "dist.get_rank()"),
        ("AssertionError: Torch not compiled with CUDA enabled", "world.device"),
        ("RuntimeError: aten.mm: got mixed torch.Tensor and DTensor", "parameter group"),
        ("RuntimeError: Expected both dimensions of mat2 to be divisible by 16", "multiples of 16"),
        (
            "RuntimeError: Missing key in checkpoint state_dict: optimizer.param_groups.1.lr.",
            "flatten_optimizer_state_dict=True",
        ),
        ("ModuleNotFoundError: No module named 'mine'", "install it into the environment of fp8-harness"),
        ("the zygote must be single-threaded to fork, but it also has: TMonitor", "tqdm.tqdm.monitor_interval = 0"),
    ],
)
def test_known_errors_have_advice(error: str, words: str) -> None:
    what, fix = advice(error)
    assert what == error
    assert fix is not None and words in fix


def test_a_misfit_brings_its_own_advice() -> None:
    assert advice("TargetMisfit: module x has no function `build`. Fix: define it.") == (
        "module x has no function `build`.",
        "define it.",
    )


def test_other_errors_have_none() -> None:
    assert advice("ValueError: 7") == ("ValueError: 7", None)


def test_the_innermost_line_of_the_user_is_named() -> None:
    assert str(own_frame(TRACEBACK)) == "/home/me/my_target.py:12 in step: return self.loss(batch)"
    assert own_frame('Traceback\n  File "/x/harness/worker/train.py", line 1, in f\n    x\n') is None
    (finding,) = failures(run_of(make_failure(traceback=TRACEBACK)), "crash")
    assert "ValueError: x, at /home/me/my_target.py:12 in step" in str(finding.values["end"])
