"""Evidence that needs GPUs: what their kernels do, and what can be proven with them."""

from harness.registry import Plugin

PLUGIN = Plugin(
    name="gpu",
    summary="evidence from GPUs and installed versions",
    commands={"dev evidence": "harness.plugins.gpu.commands:evidence_command"},
)
