from harness.checks.check import Rules, Stage

_declares = Rules("quiet", Stage.BF16)
LOUD = _declares("loud", "the loss is above 20 nats")


@_declares.judged_by(blind="What a loss of less than 20 nats hides.")
def check_quiet(case, run, witnesses):
    """Is every loss below 20 nats?"""
    for trace in run.traces:
        for number, step in enumerate(trace.steps, 1):
            if not step.loss < 20:
                yield LOUD.finding(step=number, rank=trace.rank, found=f"{step.loss:.4g}")
