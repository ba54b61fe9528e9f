"""From a plan to results: selection, schedule, running and judging a case, witnesses. Their order is `workflow.py`."""
