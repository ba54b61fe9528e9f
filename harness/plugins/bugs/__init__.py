"""Bugs: from a report or a configuration to a case that fails, and from there to a script that upstream can run."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="bugs",
    summary="reported bugs as cases, and cases as reports",
    section="Bugs and trainers",
    commands={"bug": "harness.plugins.bugs.commands:bug"},
    answers={
        "bug files": "harness.plugins.bugs.bugfile:cases_of_bugs",
        "configurations": "harness.plugins.bugs.commands:case_of_configuration",
    },
)
