"""Settings of every test: hypothesis profiles `dev` (default) and `nightly` (HYPOTHESIS_PROFILE=nightly)."""

from __future__ import annotations

from hypothesis import settings

from tests.examples import PROFILE, examples

# No deadline: the time of one example says nothing on a machine that other jobs use too. Every run draws other ones.
settings.register_profile("dev", deadline=None, max_examples=examples(50))
settings.register_profile("nightly", deadline=None, max_examples=100, print_blob=True)
settings.load_profile(PROFILE)
