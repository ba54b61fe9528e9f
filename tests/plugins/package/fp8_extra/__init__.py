"""A plug-in of somebody else."""

from harness.registry import Injections, Plugin, Target

PLUGIN = Plugin(
    name="extra",
    summary="a check of how loud losses are",
    section="Extra",
    commands={"extra": "fp8_extra.commands:extra", "dev extra": "fp8_extra.commands:extra"},
    targets={"extra_llama": Target(module="fp8_extra.ranks", llama=True)},
    checks=("fp8_extra.checks:check_quiet",),
    injections={"extra:": Injections(check="fp8_extra.injections:known", plant="fp8_extra.ranks:plant")},
)
