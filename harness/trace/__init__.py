"""The trace: what a run recorded. Plain numbers and strings, no torch; one file for each thing that is recorded."""

from harness.trace.run import RankFailure, RankTrace, Run, StepTrace

__all__ = ["RankFailure", "RankTrace", "Run", "StepTrace"]
