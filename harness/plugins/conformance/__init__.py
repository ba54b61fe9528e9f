"""Conformance: DTensor's sharding strategies for the operators of FP8 training."""

from harness.registry import PageSection, Plugin

PLUGIN = Plugin(
    name="conformance",
    summary="DTensor's sharding strategies for the operators of FP8 training",
    commands={"dev conformance": "harness.plugins.conformance.commands:conformance_command"},
    sections={
        "conformance": PageSection(
            help="Add the table of `dev conformance --json`.", read="harness.plugins.conformance.commands:read_section"
        )
    },
)
