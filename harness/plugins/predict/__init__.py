"""Predictions of what a step of a case costs: memory, traffic and time."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="predict",
    summary="memory, traffic and time of a step, before it runs",
    section="Predict",
    commands={"predict": "harness.plugins.predict.commands:predict"},
)
