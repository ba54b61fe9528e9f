"""torchtitan's own trainer as a target."""

from harness.registry import Plugin, Target

# Named for the version of torchtitan that it drives: so a case means the same wherever it is read.
NAME = "torchtitan_0_3"
VERSION = "0.3.0"

PLUGIN = Plugin(
    name="torchtitan",
    summary="torchtitan's own trainer as a target",
    targets={
        NAME: Target(
            module="harness.plugins.torchtitan.worker",
            llama=True,
            plain_shards=True,
            package=("torchtitan", VERSION),
            extra="torchtitan-0-3",
        )
    },
)
