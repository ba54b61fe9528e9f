"""How many examples a property is tried on: a few for every commit, many every night."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")


def examples(nightly: int) -> int:
    """So many every night, and a fifth of them otherwise."""
    return nightly if PROFILE == "nightly" else nightly // 5
