"""Runs any command that expects GPUs on CPU ranks, and checks what it trains."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="exec",
    summary="scripts and tests that expect GPUs, on CPU ranks",
    commands={"exec": "harness.plugins.exec.commands:exec_command"},
    section="Bugs and trainers",
    answers={
        "watch a model": "harness.plugins.exec.worker.watch:watching",
        "compare records": "harness.plugins.exec.judge:compare",
    },
)
