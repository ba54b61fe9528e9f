"""Dispatcher hooks: notify observers of every operator that a rank executes, on every device and in compiled code.

`hook.py` installs them, once for a process.
"""
