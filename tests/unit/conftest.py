"""`st.from_type(Case)` is any case at all, excluded ones too."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.matrix.case import Case
from tests.strategies import CASES

st.register_type_strategy(Case, CASES)
