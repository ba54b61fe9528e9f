"""What the programs of this folder share. Imports no torch, whose import would count as time of the controller."""

from __future__ import annotations

from harness.matrix.case import Case

FOLDER_VARIABLE = "FP8_HARNESS_STAGES"  # where ranks that are sampled leave what they found (`stage_program.py`)


def kind_of(case: Case) -> str:
    """What a case is counted with."""
    if case.compile != "none":
        return f"compiled, {'async TP' if case.layout.async_tp else 'no async TP'}"
    data, tensor = case.layout.dp > 1, case.layout.tp > 1
    return "eager, " + ("FSDP2 x TP" if data and tensor else "FSDP2" if data else "TP" if tensor else "one rank")
