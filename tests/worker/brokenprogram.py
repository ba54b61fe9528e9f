"""The rank program of a torch that lacks the names in the option `without`, whose other modules have imported them."""

import importlib
from collections.abc import Mapping

from harness.worker import main
from harness.worker.main import notes, rank_main

__all__ = ["notes", "preload", "rank_main"]


def preload(options: Mapping[str, str]) -> None:
    importlib.import_module("torch._inductor.compile_fx")
    for name in options["without"].split():
        module, _, attribute = name.rpartition(".")
        delattr(importlib.import_module(module), attribute)
    main.preload(options)
