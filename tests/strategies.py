"""What properties are drawn from: any case at all (`CASES`), cases that make sense, and cases that train."""

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence

from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import AXES, axis_type, case_from_axes, choices
from harness.matrix.case import Case
from harness.matrix.rules import EXCLUSIONS, REFUSALS, Rule

Values = Mapping[str, object]
Strategies = Mapping[str, st.SearchStrategy[object]]
Choices = Mapping[str, Sequence[object]]

_SETTINGS = st.sampled_from(["ten", "axs", "dis"])
_CASTS = st.dictionaries(st.sampled_from(["i", "i_gw", "w", "w_gi", "go", "go_gw"]), _SETTINGS).map(
    lambda casts: tuple(f"{operand}:{setting}" for operand, setting in casts.items())
)
_FILTERS = st.lists(st.sampled_from(["wq", "wk", "attention", "layers.1", "output", "nothing_here", "1e"]), max_size=3)

# Axes without a list of choices: what they can be at all, and numbers that fit together more often than not.
_ANY: Strategies = {
    "target": st.sampled_from(["reference", "torchtitan", "my_pkg.my_target", "trainer"]),
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
    "pp": st.integers(1, 8),
    "ep": st.integers(1, 8),
    "cp": st.integers(1, 8),
    "experts": st.integers(0, 16),
    "top_k": st.integers(1, 8),
    "filter_fqns": _FILTERS,
    "casts": _CASTS,
    "checkpoint_every": st.integers(1, 5),
    "steps": st.integers(1, 100_000),
    "global_batch": st.integers(1, 40),
    "seq_len": st.integers(1, 80),
    "accumulation": st.integers(1, 8),
    "max_norm": st.none() | st.floats(0, 1e6, exclude_min=True),
    "lr": st.floats(0, 10, exclude_min=True),
    "seed": st.integers(0, 2**32 - 1),
    "loss_tolerance": st.none() | st.floats(0, 100, exclude_min=True),
}
_FITTING: Choices = {
    "vocab_size": [2048, 2050, 2256],
    "pad_vocab_to_multiple_of": [1, 128],
    "layers": [1, 2, 3],
    "kv_heads": [None, 4],
    "ffn_dim": [None, 512, 320],
    "dp_replicate": [1, 2],
    "dp_shard": [1, 2, 3, 4],
    "tp": [1, 2, 4, 8],
    "pp": [1, 2],
    "ep": [1, 2],
    "cp": [1, 2],
    "experts": [0, 4],
    "top_k": [1, 2],
    "filter_fqns": [(), ("wk",), ("layers.0", "w1")],
    "casts": [(), ("go:e4m3",), ("go_gw:dis", "i_gw:dis"), ("i:ten", "w_gi:ten"), ("i:dis", "w:dis")],
    "checkpoint_every": [1, 2],
    "global_batch": [8, 16, 24],
    "seq_len": [32, 40],
    "accumulation": [1, 2],
    "max_norm": [None, 0.5],
    "loss_tolerance": [None, 0.5],
}

_AT_ONCE = 6  # axes in a draw: fewer combinations than Hypothesis draws evenly


def _strategy(name: str) -> st.SearchStrategy[object]:
    known = choices(name)
    assert known or name in _ANY, f"no strategy for axis {name} of {axis_type(name)}"
    return st.sampled_from(known) if known else _ANY[name]


_HALF = len(AXES) // 2
_MASKS = st.tuples(st.integers(0, 2**_HALF - 1), st.integers(0, 2 ** (len(AXES) - _HALF) - 1))
_STRATEGIES = {name: _strategy(name) for name in AXES}


@st.composite
def _any_values(draw: st.DrawFn) -> Values:
    low, high = draw(_MASKS)  # which axes are set: two draws instead of one for each
    return {name: draw(_STRATEGIES[name]) for at, name in enumerate(AXES) if (high << _HALF | low) >> at & 1}


def _without(values: Values, names: Iterable[str]) -> Values:
    return {name: value for name, value in values.items() if name not in names}


def _case(values: Values) -> Case:
    """The case of these values; heads that do not fit are those of the preset, which fit every dim."""
    try:
        return case_from_axes(values)
    except HarnessError:
        return case_from_axes(_without(values, ("heads", "kv_heads")))


def _mended(values: Values, rules: Sequence[Rule]) -> Case:
    """The case of these values; where a rule applies to it, an axis of the rule gets its default, or all of them do."""
    case = _case(values)
    while broken := next((rule for rule in rules if rule.applies(case)), None):
        fewer = (_without(values, names) for names in (*((name,) for name in broken.axes), broken.axes))
        values = next(candidate for candidate in fewer if not broken.applies(_case(candidate)))
        case = _case(values)
    return case


def _together(axes: Choices) -> st.SearchStrategy[Values]:
    """A value of each of these axes by one draw, which is most of the time of an example."""

    def values(number: int) -> Values:
        drawn = {}
        for name, known in axes.items():
            number, at = divmod(number, len(known))
            drawn[name] = known[at]
        return drawn

    return st.integers(0, math.prod(map(len, axes.values())) - 1).map(values)


def _cases(rules: Sequence[Rule], *but: str) -> st.SearchStrategy[Case]:
    """Cases to which none of these rules applies; the axes `but` have their defaults."""
    known = {name: choices(name) or _FITTING.get(name) for name in AXES if name not in but}
    axes = [(name, options) for name, options in known.items() if options]
    parts = [_together(dict(axes[at : at + _AT_ONCE])) for at in range(0, len(axes), _AT_ONCE)]
    return st.tuples(*parts).map(lambda drawn: _mended(dict(ChainMap(*drawn)), rules))


CASES = _any_values().map(_case)
POSSIBLE_CASES = _cases(EXCLUSIONS)
TRAINED_CASES = _cases((*EXCLUSIONS, *REFUSALS))
EAGER_CASES = _cases((*EXCLUSIONS, *REFUSALS), "compile")
# Of experts nothing is known of memory and of FLOPs before they run.
_OF_EXPERTS = ("experts", "ep", "grouped_mm")
DENSE_CASES = _cases(EXCLUSIONS, "pp", *_OF_EXPERTS)
TRAINED_DENSE_CASES = _cases((*EXCLUSIONS, *REFUSALS), "pp", *_OF_EXPERTS)
EAGER_DENSE_CASES = _cases((*EXCLUSIONS, *REFUSALS), "compile", "pp", *_OF_EXPERTS)
