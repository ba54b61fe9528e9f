"""Injected faults, and mutation testing: which checks find which fault."""

from harness.registry import Injections, PageSection, Plugin

PLUGIN = Plugin(
    name="faults",
    summary="injected faults, and which checks find them",
    commands={"dev mutate": "harness.plugins.faults.commands:mutate_command"},
    injections={
        "fault:": Injections(
            check="harness.plugins.faults.faults:fault_named", plant="harness.plugins.faults.worker:plant"
        )
    },
    sections={
        "mutations": PageSection(
            help="Add the mutation matrix of `dev mutate --json` to the page.",
            read="harness.plugins.faults.commands:read_section",
        )
    },
    answers={
        "injected faults": "harness.plugins.faults.faults",
        "mutation testing": "harness.plugins.faults.mutation",
        "catalogue of faults": "harness.plugins.faults.kills:catalogue",
    },
)
