"""FP8 parallel training in your own tests: functions to call in any pytest. See docs/library.md.

It stands above the harness like a front end: no project, no options, nothing stored but in the cache folder of the
user. Importing it costs nothing.
"""

from fp8_harness.cases import assert_case
from fp8_harness.handoff import assert_handoff
from fp8_harness.layouts import assert_layouts_equal
from fp8_harness.watching import compare, watch

__all__ = ["assert_case", "assert_handoff", "assert_layouts_equal", "compare", "watch"]
