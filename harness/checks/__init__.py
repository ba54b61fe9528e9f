"""Checks: pure functions from traces and references to findings, without torch. Start with `judge.py`."""
