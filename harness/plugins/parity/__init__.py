"""Parity: one model in many layouts, with one rank, another revision or the curve of another run."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="parity",
    summary="one model in many layouts, beside one rank",
    section="Compare",
    commands={"parity": "harness.plugins.parity.commands:parity_command"},
    answers={"probe logprobs": "harness.plugins.parity.worker.logprobs:LogprobProbe"},
)
