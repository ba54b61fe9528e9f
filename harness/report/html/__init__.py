"""The report of a run as one HTML file that needs no network: `page.py` makes it of `data.py` and `sections.py`."""
