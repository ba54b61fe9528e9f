"""Failures as GPUs, NCCL and gloo tell them: the verdict, the first cause, and what is only a consequence.

The texts have the form of torch's and the driver's; no GPU is needed.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.failures import advice
from harness.engine.messages import Job, JobOutcome, RankOutcome, ShareOutcome
from harness.engine.outcome import conclude
from harness.engine.processes import JobFolder
from harness.engine.symptoms import MACHINE_SIGNALS, SYMPTOMS, read

CUDA = (
    "AcceleratorError: CUDA error: {} Search for `cudaError' in https://docs.nvidia.com for more information. CUDA "
    "kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
)
ILLEGAL = CUDA.format("an illegal memory access was encountered")
LAUNCH = CUDA.format("unspecified launch failure")
ECC = CUDA.format("uncorrectable ECC error encountered")
REMOTE = (
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3763, remote process exited or there was a network error, "
    "NCCL version 2.29.3 ncclRemoteError: A call failed possibly due to a network error or a remote process exiting."
)
GLOO_LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:51022"
STORE_LOST = "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"
GLOO_LATE = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:119] Timed out waiting 60000ms for recv operation to complete"
)


def work(name: str = "ALLREDUCE", number: int = 1580) -> str:
    return f"WorkNCCL(SeqNum={number}, OpType={name}, NumelIn=64, NumelOut=64, Timeout(ms)=60000)"


def watchdog(rank: int, name: str = "ALLREDUCE", number: int = 1580, report: str = "") -> str:
    """What the watchdog logs before it takes the process down, with the frames of C++ that end such a log."""
    late = (
        f"Watchdog caught collective operation timeout: {work(name, number)} ran for {60000 + rank} milliseconds before"
    )
    head = f"[rank{rank}]:[E1123 02:00:00 ProcessGroupNCCL.cpp:{{}}] "
    frames = "\n".join(
        f"frame #{index}: c10d::ProcessGroupNCCL + 0x{index:x} (libtorch_cuda.so)" for index in range(60)
    )
    return "\n".join(
        (
            f"{head.format(683)}[Rank {rank}] {late} timing out.{report}",
            f"{head.format(2197)}[PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure detected by watchdog",
            f"{head.format(730)}To avoid data inconsistency, we are taking the entire process down.",
            f"terminate called after throwing an instance of 'c10::DistBackendError'\n{frames}",
        )
    )


def out_of_memory(*, total: float, free: float, asked: float, own: float | None, others: dict[int, float]) -> str:
    held = "".join(f"Process {pid} has {size:.2f} GiB memory in use. " for pid, size in others.items())
    mine = "" if own is None else f"Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. "
    return (
        f"OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of "
        f"{total:.2f} GiB of which {free:.2f} GiB is free. {held}{mine}Of the allocated memory 15.03 GiB is allocated "
        "by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )


def raised(rank: int, message: str, seconds: float = 1.0) -> RankOutcome:
    return RankOutcome(rank=rank, status="raised", message=message, phase="step 3", seconds=seconds)


def aborted(rank: int, log: str, seconds: float = 1.0) -> RankOutcome:
    """A rank that died of SIGABRT, with the output as its engine keeps it."""
    return RankOutcome(rank=rank, status="signaled", message="killed by SIGABRT", seconds=seconds, log_tail=log)


def stuck(rank: int, log: str = "") -> RankOutcome:
    return RankOutcome(rank=rank, status="stuck", message="did not finish", seconds=2.0, log_tail=log)


def stopped(rank: int) -> RankOutcome:
    return RankOutcome(rank=rank, status="stopped", message="stopped by a signal", seconds=2.0)


def outcome_of(*ranks: RankOutcome, hung: bool = False, gpus: bool = True) -> JobOutcome:
    job = Job(job_id="job", world_size=len(ranks), payload=b"", deadline_s=5)
    return conclude(job, [ShareOutcome(ranks=ranks, hung=hung)], on_gpus=gpus)


def causes(outcome: JobOutcome) -> list[int]:
    return [rank.rank for rank in outcome.ranks if rank.status != "returned" and not rank.consequence]


BROKEN = [
    ECC,
    CUDA.format("Invalid access of peer GPU memory over nvlink or a hardware error"),
    CUDA.format("CUDA-capable device(s) is/are busy or unavailable"),
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "RuntimeError: Error 803: system has unsupported display driver / cuda driver combination",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
    "NVMLError: Driver/library version mismatch",
    "RuntimeError: GPU is lost",
    "DistBackendError: NCCL error: unhandled system error. Error while creating shared memory segment /dev/shm/nccl-a",
]


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_gpu_or_driver_is_infra_with_advice_and_without_gpus_a_crash_of_the_target(message: str) -> None:
    outcome = outcome_of(raised(0, message), stuck(1))
    assert (outcome.status, causes(outcome)) == ("infra", [0])
    assert outcome.message.endswith("this fails on this machine, not in the case")
    advised = advice(outcome.ranks[0].message)
    assert advised.fix is not None and "nvidia-smi" in advised.fix
    assert outcome_of(raised(0, message), gpus=False).status == "crash"


@pytest.mark.parametrize("message", [ILLEGAL, LAUNCH, CUDA.format("device-side assert triggered")])
def test_an_error_of_a_kernel_is_a_crash_of_the_case(message: str) -> None:
    outcome = outcome_of(raised(0, message), raised(1, REMOTE, 0.5), stuck(2))
    assert (outcome.status, causes(outcome), outcome.message) == ("crash", [0], f"rank 0 in 'step 3': {message}")


def killed(rank: int, number: signal.Signals, seconds: float = 1.0, log: str = "") -> RankOutcome:
    message = f"killed by {number.name}"
    return RankOutcome(rank=rank, status="signaled", message=message, seconds=seconds, log_tail=log, signal=number)


def test_a_signal_from_outside_is_infra_and_the_cause_whatever_was_told_first() -> None:
    for number in MACHINE_SIGNALS:
        outcome = outcome_of(raised(0, "ValueError: lost a peer", 0.5), killed(1, number), stuck(2), gpus=False)
        assert (outcome.status, causes(outcome)) == ("infra", [1])
        assert advice(f"killed by {number.name}, not by the harness: possibly").fix
    for number in set(signal.Signals) - MACHINE_SIGNALS.keys():
        assert outcome_of(killed(0, number), gpus=False).status == "crash"


ALLOCATOR = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate {} bytes. Error code 12 (Cannot allocate memory)"
)
NO_ROOM_HERE = [
    "MemoryError",
    "_ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",
    ALLOCATOR.format(4000000),
    "OSError: [Errno 28] No space left on device: '/tmp/x'",
    "RuntimeError: unable to write to file </torch_1_2_0>: No space left on device (28)",
    "RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed. ",
]


@pytest.mark.parametrize("message", NO_ROOM_HERE)
def test_a_host_without_memory_or_disk_is_infra(message: str) -> None:
    outcome = outcome_of(raised(0, message), raised(1, GLOO_LOST, 0.9), gpus=False)
    assert (outcome.status, causes(outcome)) == ("infra", [0])
    assert outcome.message.endswith(": this machine has no memory or no disk space left")
    assert "df -h" in str(advice(outcome.message).fix)


def test_what_no_host_could_hold_or_a_rank_only_prints_is_a_crash() -> None:
    assert outcome_of(raised(0, ALLOCATOR.format(1 << 60)), gpus=False).status == "crash"
    assert outcome_of(raised(0, "OutOfMemoryError: XPU out of memory"), gpus=False).status == "crash"
    assert outcome_of(raised(0, "ValueError: no MemoryError here"), gpus=False).status == "crash"
    assert outcome_of(killed(0, signal.SIGSEGV, log="\n".join(NO_ROOM_HERE)), gpus=False).status == "crash"
    bad = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
    assert outcome_of(killed(0, signal.SIGABRT, log=bad), gpus=False).status == "infra"


def test_the_output_of_a_dead_rank_and_a_broken_gpu_are_the_cause() -> None:
    log = f"terminate called\n  what(): Process group watchdog thread terminated with exception: {ILLEGAL}\nframe #0"
    outcome = outcome_of(aborted(0, log), stuck(1))
    assert outcome.message == "rank 0: killed by SIGABRT: CUDA error: an illegal memory access was encountered"
    outcome = outcome_of(raised(0, LAUNCH, 1.0), aborted(1, f"what(): {ECC}", 1.4), raised(2, REMOTE, 0.9))
    assert (outcome.status, causes(outcome)) == ("infra", [1])
    hung = outcome_of(stuck(0), stuck(1, "NVRM: Xid 79: GPU has fallen off the bus."), hung=True)
    assert (hung.status, causes(hung)) == ("infra", [1])


@pytest.mark.parametrize("message", [REMOTE, GLOO_LOST, STORE_LOST])
def test_a_lost_connection_is_a_consequence_however_early(message: str) -> None:
    outcome = outcome_of(raised(0, message, 1.0), raised(1, "ValueError: mine", 5.0), gpus=message == REMOTE)
    assert (outcome.message, causes(outcome)) == ("rank 1 in 'step 3': ValueError: mine", [1])
    alone = outcome_of(raised(0, message), stuck(1))
    assert (alone.status, causes(alone)) == ("crash", [0]), "nothing else explains it"


def test_a_collective_that_times_out_is_a_hang_with_its_name_and_who_did_not_arrive() -> None:
    outcome = outcome_of(aborted(0, watchdog(0)), stuck(1), aborted(2, watchdog(2)))
    assert (outcome.status, causes(outcome)) == ("hang", [0, 1, 2])
    assert outcome.message == "ranks 0, 2: ALLREDUCE #1580 timed out after 60 s; rank 1: stuck elsewhere"
    assert outcome.ranks[0].message == "killed by SIGABRT: ALLREDUCE #1580 timed out after 60 s"
    outcome = outcome_of(aborted(0, watchdog(0)), aborted(1, watchdog(1, "BROADCAST")))
    assert outcome.message == (
        "rank 0: ALLREDUCE #1580 timed out after 60 s; rank 1: BROADCAST #1580 timed out after 60 s"
    )
    report = (
        "\n\t - [0] Timeout at collective: ALLREDUCE, #1580\n\t - To our best knowledge, the lagging/dead/mismatched "
        "ranks that caused the desync are:\n\t     [1] finished collective #1579, but didn't join collective #1580 "
    )
    outcome = outcome_of(aborted(0, watchdog(0, report=report)), stuck(1))
    assert "([1] finished collective #1579, but didn't join collective #1580)" in outcome.message
    outcome = outcome_of(raised(0, GLOO_LATE), raised(1, GLOO_LOST, 1.1), stuck(2), gpus=False)
    assert (outcome.status, causes(outcome)) == ("hang", [0, 2])
    assert outcome.message == "rank 0: Timed out waiting 60000ms for recv; rank 2: stuck elsewhere"


def test_the_watchdog_is_not_the_cause_where_another_rank_failed() -> None:
    died = RankOutcome(rank=1, status="exited", message="exited with code 7", seconds=70.0)
    for other in (raised(1, "ValueError: mine", 70.0), raised(1, ILLEGAL, 70.0), died, stopped(1)):
        outcome = outcome_of(aborted(0, watchdog(0), 60.0), other, aborted(2, watchdog(2), 60.0))
        assert causes(outcome) == [1]
    assert outcome_of(raised(0, GLOO_LATE, 60.0), raised(1, "ValueError: mine", 61.0), gpus=False).status == "crash"


def test_memory_that_others_hold_is_infra_also_in_a_container() -> None:
    others = out_of_memory(total=31.36, free=0.46, asked=1.16, own=16.63, others={19239: 14.26})
    outcome = outcome_of(raised(0, others))
    assert outcome.status == "infra"
    assert "other processes (19239) hold 14.27 GiB of 31.36 GiB: this fails on this machine" in outcome.message
    mine = outcome_of(raised(0, out_of_memory(total=39.56, free=0.4, asked=3.15, own=37.61, others={7: 0.5})))
    assert (mine.status, mine.message[-50:]) == ("crash", ": the case needs more than the 39.56 GiB of the GPU"[-50:])
    assert outcome_of(raised(0, "RuntimeError: CUDA error: out of memory")).status == "crash"
    alone = out_of_memory(total=24.0, free=0.2, asked=1.0, own=None, others={20398: 23.5})
    assert outcome_of(raised(0, alone)).status == "crash"
    crowded = out_of_memory(total=40.0, free=0.2, asked=1.0, own=None, others={20398: 17.0, 7: 22.8})
    assert "other processes (7) hold" in outcome_of(raised(0, crowded)).message


@given(st.floats(8, 192), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1))
def test_who_is_short_of_memory(total: float, own_part: float, others_part: float, asked_part: float) -> None:
    """Infra only if the case would fit on the empty GPU; and always if it clearly would."""
    own, asked = round(total * own_part, 2), round(total * asked_part, 2)
    others = round((total - own) * others_part, 2)
    free = max(0.0, total - own - others)  # rounded as torch prints it
    message = out_of_memory(total=total, free=free, asked=asked, own=own, others={7: others})
    kind = read(raised(0, message), on_gpus=True).kind
    if kind == "machine":
        assert own + asked <= total and asked > free - 0.02
    elif asked > free + 0.02:
        assert own + asked > 0.94 * total


TEXTS = st.sampled_from([ILLEGAL, ECC, REMOTE, GLOO_LOST, GLOO_LATE, "ValueError: mine", "", "\n".join(BROKEN)])
RANKS = st.lists(
    st.tuples(
        st.sampled_from(["returned", "raised", "exited", "signaled", "stuck", "stopped"]), TEXTS, st.floats(0, 9)
    ),
    min_size=1,
    max_size=6,
)


@given(RANKS, st.booleans(), st.booleans())
def test_every_failure_has_a_cause_and_nothing_that_failed_is_good(
    ends: list[tuple[str, str, float]], gpus: bool, hung: bool
) -> None:
    ranks = tuple(
        RankOutcome(rank=rank, status=status, message=text, seconds=seconds, log_tail=text)  # type: ignore[arg-type]
        for rank, (status, text, seconds) in enumerate(ends)
    )
    failed = any(rank.status != "returned" for rank in ranks)
    outcome = outcome_of(*ranks, hung=failed and hung, gpus=gpus)
    assert (outcome.status == "ok") == (not failed)
    assert bool(causes(outcome)) == failed
    assert outcome == outcome_of(*reversed(ranks), hung=failed and hung, gpus=gpus), "the order of arrival is chance"


def test_what_names_a_cause_is_kept_of_a_long_log(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.log(0).write_text(f"step 1\n{watchdog(0)}\nlast words")
    kept = folder.log_tail(0).splitlines()
    assert "Watchdog caught collective operation timeout" in kept[0] and kept[-1] == "last words"
    assert len(kept) < 50
    folder.log(1).write_text("\n".join(map(str, range(100))))
    assert folder.log_tail(1).splitlines() == [str(line) for line in range(60, 100)]


def test_every_symptom_has_a_source_and_is_no_other_one() -> None:
    assert all(symptom.source for symptom in SYMPTOMS)
    assert len({symptom.pattern for symptom in SYMPTOMS}) == len(SYMPTOMS)
    assert all(re.compile(symptom.pattern).search("") is None for symptom in SYMPTOMS)
