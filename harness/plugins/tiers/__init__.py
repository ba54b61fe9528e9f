"""The choice of the cases of a tier: a cheap set that covers it and hosts every injected fault."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="tiers",
    summary="the choice of the cases of a tier",
    commands={"dev tier": "harness.plugins.tiers.commands:tier_command"},
)
