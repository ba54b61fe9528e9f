"""What `exec` says of how a command ended: the line of the script, and the way on."""

from __future__ import annotations

import pytest

from harness.errors import HarnessError
from harness.plugins.exec.report import answer_of, lines
from harness.plugins.exec.request import Absent, ProcessRecord
from harness.plugins.exec.supervise import Outcome, Stack, check_room, stack_of
from harness.plugins.exec.worker.script import main_of

LAUNCHER = ProcessRecord(pid=1, rank=0, world_size=1, ended="ChildFailedError: rank 1", exit_code=1)


def ended(*records: ProcessRecord, code: int = 1) -> str:
    answer = answer_of(Outcome(exit_code=code, seconds=1.0, records=records))
    return list(lines(answer, {"gpu": "h100"}))[-1]


def test_the_rank_that_raised_is_named_and_not_its_launcher() -> None:
    raised = ProcessRecord(pid=2, rank=1, world_size=2, ended="train.py:7: ValueError: no", exit_code=1)
    assert ended(LAUNCHER, raised) == "exec: error: rank 1: train.py:7: ValueError: no"


def test_a_rank_that_ended_without_an_exception_is_named_by_its_code() -> None:
    early = ProcessRecord(pid=2, rank=1, world_size=2, exit_code=9)
    assert "rank 1 ended with exit code 9 and no exception" in ended(LAUNCHER, early)


def test_a_missing_package_says_how_to_install_it() -> None:
    missing = ProcessRecord(
        pid=2, rank=0, world_size=1, ended="train.py:1: ModuleNotFoundError: No module named 'wandb.sdk'", exit_code=1
    )
    assert ended(missing).endswith("Fix: install it: `pip install wandb`.")


def test_nothing_is_wrong_where_the_command_ends_well_and_uses_are_added_up() -> None:
    use = Absent(name="torch.cuda.synchronize", effect="does nothing", line="train.py:3", calls=2)
    records = [ProcessRecord(pid=pid, rank=pid, world_size=2, absent=(use,)) for pid in range(2)]
    answer = answer_of(Outcome(exit_code=0, seconds=1.0, records=tuple(records)))
    assert (answer.exit_code, answer.error, answer.ranks) == (0, "", 2)
    assert [(absent.name, absent.calls) for absent in answer.absent] == [("torch.cuda.synchronize", 4)]


def test_a_bound_that_is_passed_names_where_each_rank_was() -> None:
    stacks = tuple(Stack(pid=rank, rank=rank, line=f"train.py:{rank}", call="") for rank in range(2))
    outcome = Outcome(exit_code=137, seconds=9.0, ended_for="it ran for more than 9 s (--timeout)", stacks=stacks)
    answer = answer_of(outcome)
    assert answer.exit_code == 1
    assert answer.error == "ended: it ran for more than 9 s (--timeout): rank 0 at train.py:0; rank 1 at train.py:1"


DUMP = """Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 3 in wait

Current thread 0x02 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 20 in <module>
"""


def test_the_innermost_line_of_the_script_is_found_in_stacks() -> None:
    assert stack_of(7, 1, DUMP) == Stack(pid=7, rank=1, line="/home/me/train.py:12", call="all_reduce")


def test_more_ranks_than_there_is_memory_for_are_refused() -> None:
    with pytest.raises(HarnessError, match="100000 ranks need 50000 GiB"):
        check_room(100_000)


@pytest.mark.parametrize("command", [("no-such-program",), ("ls",), ("python", "-u")])
def test_what_is_no_python_program_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(HarnessError, match="Fix"):
        main_of(command)
