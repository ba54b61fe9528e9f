"""Settings of every test: hypothesis profiles `dev` (default) and `ci` (HYPOTHESIS_PROFILE=ci)."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: the time of one example says nothing on a machine that other jobs use too. `dev` draws other examples in
# every run, `ci` the same ones, four times as many.
settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
