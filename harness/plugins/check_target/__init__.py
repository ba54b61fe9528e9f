"""Whether a target does what the harness needs, and what to change where it does not."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="check_target",
    summary="checks of a target",
    section="Bugs and trainers",
    commands={"check-target": "harness.plugins.check_target.commands:check_target_command"},
)
