"""torchtitan's own trainer as a target: main, by commit."""

from harness.hints import INSTALL_TORCHTITAN
from harness.registry import Plugin, Target

NAME = "torchtitan"

PLUGIN = Plugin(
    name="torchtitan",
    summary="torchtitan's own trainer as a target",
    targets={
        NAME: Target(
            module="harness.plugins.torchtitan.worker",
            llama=True,
            plain_shards=True,
            attends_apart=True,
            package="torchtitan",
            install=INSTALL_TORCHTITAN,
            require="harness.plugins.torchtitan.names:require",
        )
    },
)
