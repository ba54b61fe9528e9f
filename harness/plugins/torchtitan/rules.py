"""What a rule of `rules.toml` asks that no selector can say."""

from harness.matrix.case import Case
from harness.matrix.linears import converted_fqns, linear_fqns
from harness.plugins.torchtitan import NAME


def parts_keys_from_values(case: Case) -> bool:
    """Return True if a filter keeps only one of a block's key and value projections."""
    converted = set(converted_fqns(case)) if case.target == NAME else set()
    keys = {fqn for fqn in linear_fqns(case) if fqn.endswith(".wk")} if converted else set()
    return any((fqn in converted) != (fqn.removesuffix("wk") + "wv" in converted) for fqn in keys)
