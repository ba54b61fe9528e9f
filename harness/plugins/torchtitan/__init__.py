"""torchtitan as a target."""

from __future__ import annotations

from harness.registry import Plugin

PLUGIN = Plugin(name="torchtitan", summary="torchtitan's own trainer as a target")
