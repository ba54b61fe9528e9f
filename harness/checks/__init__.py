"""Judgement: traces and witnesses in, findings out. Pure functions, no torch; `judge.py` is where to start."""
