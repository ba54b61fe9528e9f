"""What exported scripts are made of: Python that runs without the harness. `harness/bugs/export/` reads it as text.

A script begins with a function `main` of one of the files here; what it needs is copied behind it. The names of
`given.py` get the values of the case: `if TP:` is decided when the script is written.
"""
