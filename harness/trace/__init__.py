"""The trace: what a run recorded, as plain numbers and strings without torch. One file per kind of record."""

from harness.trace.run import RankFailure, RankTrace, Run, StepTrace

__all__ = ["RankFailure", "RankTrace", "Run", "StepTrace"]
