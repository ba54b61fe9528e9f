"""Weights that change hands: whether what a trainer exports is what it trained, tensor by tensor."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="handoff",
    summary="exported weights beside the trainer's, in every FP8 format",
    section="Compare",
    commands={"handoff": "harness.plugins.handoff.commands:handoff_command"},
    rules=("harness.plugins.handoff.rules:RULES",),
    answers={
        "check a hand-off": "harness.plugins.handoff.library:judge",
        "hand off on a rank": "harness.plugins.handoff.worker.states:hand_off",
    },
)
