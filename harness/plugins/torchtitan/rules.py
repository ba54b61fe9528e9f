"""What a rule of `rules.toml` asks that no selector can say."""

from harness.matrix.case import Case
from harness.matrix.linears import converted_fqns, linear_fqns


def parts_keys_from_values(case: Case) -> bool:
    """Return True if a filter keeps only one of a block's key and value projections."""
    converted = set(converted_fqns(case))
    keys = {fqn for fqn in linear_fqns(case) if fqn.endswith(".wk")}
    return any((fqn in converted) != (fqn.removesuffix("wk") + "wv" in converted) for fqn in keys)


def cuts_other_sequences(case: Case) -> bool:
    """Return True if a rank of context parallelism has another part of a row than of every sequence in it."""
    return case.layout.cp > 1 and case.microbatch != 1


def leaves_no_halves(case: Case) -> bool:
    """Return True if ranks of context parallelism have an odd number of positions, or TP ranks that share these."""
    halves = 2 * case.layout.cp * case.layout.shares_of_sequence
    return case.layout.cp > 1 and case.train.seq_len % halves != 0
