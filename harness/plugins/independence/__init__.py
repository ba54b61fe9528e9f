"""Independence: what a forward pass must not depend on: later tokens, other sequences, other microbatches, padding."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="independence",
    summary="what a token must not depend on: later ones, other sequences, padding",
    commands={"dev independence": "harness.plugins.independence.commands:independence_command"},
    rules=("harness.plugins.independence.relations:RULES",),
)
