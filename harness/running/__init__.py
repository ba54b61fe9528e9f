"""From a plan to results: selection, briefs, schedule, work on a case, witnesses. Their order is `workflow.py`."""
