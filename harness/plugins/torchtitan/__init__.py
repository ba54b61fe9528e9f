"""torchtitan as a target."""
