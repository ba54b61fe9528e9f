"""Installs all dispatcher hooks: the one place that does, once for a process."""

import importlib

from harness.internals import RUN
from harness.worker.process import internals
from harness.worker.process.process import PROCESS

# The modules of this package with hooks, and the private parts that each uses.
_MODULES = {"collectives": RUN, "grouped_mm": RUN, "scaled_mm": RUN, "products": "flops", "fused": internals.ASYNC_TP}


def install_hooks(*, compiled: bool = True) -> None:
    """Install every hook whose private parts are as declared; `compiled`: those of compiled runs too."""
    for name, part in _MODULES.items():
        entry = f"hooks of {name}"
        if PROCESS.has(entry) or internals.gaps(part) or (internals.is_of_compiled_runs(part) and not compiled):
            continue
        PROCESS.keep(entry, *importlib.import_module(f"{__package__}.{name}").install())
