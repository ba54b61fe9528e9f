"""torchtitan's own trainer as a target: main, by commit."""

from harness.hints import INSTALL_TORCHTITAN
from harness.registry import Plugin, Target

NAME = "torchtitan"
REGISTERED = (f"{NAME}.llama3", f"{NAME}.qwen3")  # which train debug models of torchtitan's registry


def _target(*, llama: bool) -> Target:
    return Target(
        module="harness.plugins.torchtitan.worker",
        llama=llama,
        plain_shards=True,
        attends_apart=True,
        package="torchtitan",
        install=INSTALL_TORCHTITAN,
        require="harness.plugins.torchtitan.names:require",
    )


PLUGIN = Plugin(
    name="torchtitan",
    summary="torchtitan's own trainer as a target",
    targets={NAME: _target(llama=True), **dict.fromkeys(REGISTERED, _target(llama=False))},
)
