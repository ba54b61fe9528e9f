"""What later runs are checked by: goldens, profiles and tolerances are recorded, reviewed and looked through."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="baseline",
    summary="goldens, profiles and tolerances are recorded",
    section="Maintain",
    commands={"baseline": "harness.plugins.baseline.commands:baseline"},
)
