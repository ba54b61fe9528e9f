"""Labels that the loss leaves out: which sequences and data-parallel ranks lose how many."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from harness.matrix.case import Case
from harness.matrix.caseid import family_id, parse_case_id, reference_case, solo_case
from tests.builders import make_case


def labels_of_ranks(case: Case) -> list[int]:
    train = case.train
    kept = [train.seq_len - train.ignored_labels(sequence) for sequence in range(train.global_batch)]
    return [sum(kept[at : at + case.local_batch]) for at in range(0, train.global_batch, case.local_batch)]


@given(ranks=st.integers(2, 9), of_a_rank=st.integers(1, 4))
def test_of_half_a_batch_some_rank_has_no_labels_and_of_an_unequal_one_each_has_fewer_than_the_one_before(
    ranks: int, of_a_rank: int
) -> None:
    case = make_case(dp_shard=ranks, global_batch=ranks * of_a_rank, ignored_tokens="half")
    labels = labels_of_ranks(case)
    assert labels[-1] == 0 and labels[0] >= case.train.seq_len
    assert sum(labels) == case.train.valid_tokens
    case = make_case(dp_shard=ranks, global_batch=ranks * of_a_rank, seq_len=64, ignored_tokens="unequal")
    labels = labels_of_ranks(case)
    assert all(more > fewer > 0 for more, fewer in itertools.pairwise(labels))
    assert sum(labels) == case.train.valid_tokens


def test_references_ignore_the_same_labels_and_by_default_all_count() -> None:
    case = parse_case_id("hsdp2x2-tp2-rowwise-v2048-s2-ignore.half-f64")
    for other in (solo_case(case), reference_case(case)):
        assert other.train.ignored_tokens == "half"
        assert other.train.valid_tokens == case.train.valid_tokens
    assert family_id(case) == "tiny-v2048-s2-gb8-sl32-ignore.half-lr0.001-seed0"
    assert make_case(dp_shard=2).train.valid_tokens == make_case(dp_shard=2).train.tokens == 256
