"""From a plan to results: selection, schedule, running and checking a case, witnesses. Their order is `workflow.py`."""
