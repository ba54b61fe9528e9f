"""fp8-harness: a correctness and regression test harness for FP8 parallel training. Start at `workflow.py`."""
