"""Launchers besides the fork server: one torchrun per case, and forks on the nodes of a Ray cluster."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="launchers",
    summary="torchrun, and Ray clusters",
    answers={
        "--launcher ray": "harness.plugins.launchers.ray_cluster",
        "--launcher torchrun": "harness.plugins.launchers.torchrun:TorchrunEngine",
    },
)
