"""Planted faults: every one is a function that patches torch, torchao or the target, as a real mistake would be made.

They are called in every rank after the virtual device is installed and before probes and the target, so a probe sees
what the fault did. What they are is in `harness/planted/faults.py`.
"""
