"""What properties are drawn from: `st.from_type(Case)` is any case at all, excluded ones too."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.spec.axes import AXES, axis_type, case_from_axes, choices
from harness.spec.case import Case

_FILTERS = st.lists(st.sampled_from(["wq", "wk", "attention", "layers.1", "output", "nothing_here", "1e"]), max_size=3)
_NUMBERS = {
    "vocab_size": st.integers(1, 5000),
    "pad_vocab_to_multiple_of": st.integers(1, 300),
    "dim": st.none() | st.sampled_from([64, 128, 256]),
    "layers": st.none() | st.integers(1, 4),
    "heads": st.none() | st.sampled_from([2, 4, 8, 16]),
    "kv_heads": st.none() | st.sampled_from([1, 2, 4, 8]),
    "ffn_dim": st.none() | st.integers(1, 600),
    "dp_replicate": st.integers(1, 4),
    "dp_shard": st.integers(1, 8),
    "tp": st.integers(1, 8),
    "filter_fqns": _FILTERS,
    "checkpoint_every": st.integers(1, 5),
    "steps": st.integers(1, 100_000),
    "global_batch": st.integers(1, 40),
    "seq_len": st.integers(1, 80),
    "lr": st.floats(0, 10, exclude_min=True),
    "seed": st.integers(0, 2**32 - 1),
    "loss_tolerance": st.none() | st.floats(0, 100, exclude_min=True),
}


def _axis(name: str) -> st.SearchStrategy[object]:
    known = choices(name)
    assert known or name in _NUMBERS, f"no strategy for axis {name} of {axis_type(name)}"
    return st.sampled_from(known) if known else _NUMBERS[name]


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    values = draw(st.fixed_dictionaries({}, optional={name: _axis(name) for name in AXES}))
    try:
        return case_from_axes(values)
    except HarnessError:  # sizes of a model that do not fit together
        assume(False)
        raise


st.register_type_strategy(Case, _cases())
