"""What is tried again: a job that the machine ended. Every run of ranks comes through here, whatever asks for it.

What ranks did themselves is never tried again until it passes. A zygote serves several jobs, and its death ends all of
them: each is tried again on a zygote of its own, so that one which kills its zygote does no harm to the others.
"""

from collections.abc import Callable

from msgspec.structs import replace

from harness.engine.messages import JobOutcome

MACHINE_ATTEMPTS = 2  # of a job that ends as `infra`
ZYGOTE_ATTEMPTS = 3  # of a job whose zygote was lost: the first may be the fault of another job


def run_with_retries(
    run: Callable[[bool], JobOutcome], *, closed: Callable[[], bool], note: Callable[[str], None]
) -> JobOutcome:
    """The outcome of the last attempt, with those before it in `earlier`.

    `run` makes one attempt; its argument says whether it needs a zygote of its own. `note` gets a line about every
    retry. Nothing is tried again once the engine is `closed`.
    """
    earlier: tuple[JobOutcome, ...] = ()
    while True:
        outcome = run(any(attempt.zygote_lost for attempt in earlier))
        attempts = (*earlier, outcome)
        if outcome.status != "infra" or closed() or not _another_is_due(attempts):
            return replace(_concluded(attempts), earlier=earlier)
        note(f"infra, trying again: {outcome.job_id}: {outcome.message}")
        earlier = (*earlier, replace(outcome, ranks=()))


def _another_is_due(attempts: tuple[JobOutcome, ...]) -> bool:
    """Losing the zygote counts apart: where another job is to blame, this one still has its retry."""
    lost = sum(attempt.zygote_lost for attempt in attempts)
    return lost < ZYGOTE_ATTEMPTS and len(attempts) - lost < MACHINE_ATTEMPTS


def _concluded(attempts: tuple[JobOutcome, ...]) -> JobOutcome:
    """The last attempt; a crash where every zygote was lost, unless the kernel had no memory for one of them."""
    last, lost = attempts[-1], [attempt for attempt in attempts if attempt.zygote_lost]
    if not last.zygote_lost or len(lost) < ZYGOTE_ATTEMPTS or any(attempt.out_of_memory for attempt in lost):
        return last
    message = f"its zygote was lost {len(lost)} times, the last {len(lost) - 1} with no other job on it: {last.message}"
    return replace(last, status="crash", message=message)
