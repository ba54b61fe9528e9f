"""GO or NO-GO: is one run as good as another, case by case, and why not?"""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="release",
    summary="GO or NO-GO: is one run as good as another?",
    section="Compare",
    commands={"compare": "harness.plugins.release.commands:compare_command"},
)
