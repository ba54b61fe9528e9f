"""Checks: pure functions from traces and witnesses to findings, without torch. Start with `judge.py`."""
