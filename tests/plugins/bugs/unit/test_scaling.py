"""A run made smaller keeps what faults depend on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plugins.bugs.fitting import MAX_RANKS, Sizes, lost, made_smaller, traits
from tests.examples import examples

DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 128])
LLAMA_70B = {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_dim": 28672, "vocab_size": 128256}


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Any run whose heads split: sizes of every remainder, even and uneven shards."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = tp * draw(st.integers(1, 4))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4, 8]))
    return Sizes(
        dim=heads * 2 * draw(st.integers(1, 80)),
        layers=draw(st.integers(1, 126)),
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=draw(st.integers(1, 60_000)),
        vocab_size=draw(st.integers(tp, 300_000)),
        local_batch=draw(st.integers(1, 64)),
        seq_len=tp * draw(st.integers(1, 4096)),
        dp_replicate=draw(st.sampled_from([1, 2, 8])),
        dp_shard=draw(DEGREES),
        tp=tp,
        every=draw(st.integers(1, 4)),
    )


@given(sizes())
@settings(max_examples=examples(200))
def test_nothing_grows_and_at_most_eight_ranks_are_left(given_sizes: Sizes) -> None:
    small, arithmetic = made_smaller(given_sizes)
    assert small.world_size <= MAX_RANKS
    for name in Sizes.__struct_fields__:
        before, after = getattr(given_sizes, name), getattr(small, name)
        assert 1 <= after <= before
        assert (name in arithmetic) == (before != after)
    assert small.dim % small.heads == 0 and small.dim // small.heads % 2 == 0


@given(sizes())
@settings(max_examples=examples(200))
def test_degrees_layers_and_tokens_keep_their_conditions(given_sizes: Sizes) -> None:
    small, _ = made_smaller(given_sizes)
    before, after = traits(given_sizes), traits(small)
    assert after["degrees"] == before["degrees"] and after["layers"] == before["layers"]
    assert (small.local_batch > 1) == (given_sizes.local_batch > 1)


@given(sizes())
@settings(max_examples=examples(200))
def test_what_is_not_kept_is_told(given_sizes: Sizes) -> None:
    small, arithmetic = made_smaller(given_sizes)
    for name in set(lost(given_sizes, small)) & {"dim", "ffn_dim", "vocab_size"} & set(arithmetic):
        assert "not every remainder could be kept" in arithmetic[name]


@given(
    vocabulary=st.integers(2048, 300_000),
    ffn_dim=st.integers(256, 60_000),
    shard=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2]),
)
@settings(max_examples=examples(200))
def test_a_run_that_fits_keeps_every_remainder(vocabulary: int, ffn_dim: int, shard: int, tp: int) -> None:
    run = Sizes(
        dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=ffn_dim, vocab_size=vocabulary, local_batch=3,
        seq_len=8192, dp_shard=shard, tp=tp,
    )  # fmt: skip
    small, _ = made_smaller(run)
    assert lost(run, small) == ()
    assert (small.vocab_size - vocabulary) % 16 == 0 and (small.ffn_dim % tp == 0) == (ffn_dim % tp == 0)
    assert small.ffn_dim < 1024 + 1 and small.dim <= 512


def test_a_misaligned_shard_of_the_vocabulary_stays_misaligned() -> None:
    run = Sizes(**{**LLAMA_70B, "vocab_size": 100_296}, local_batch=1, seq_len=8192, dp_shard=16, tp=8)
    small, _ = made_smaller(run)
    assert 100_296 // 8 % 16 == small.vocab_size // small.tp % 16 != 0
    assert (small.dp_shard, small.tp, small.layers) == (2, 4, 2)


def test_a_stack_keeps_uneven_shards() -> None:
    small, _ = made_smaller(Sizes(**LLAMA_70B, local_batch=2, seq_len=64, dp_shard=3))
    assert small.dp_shard == 3 and small.dim % 3 and small.ffn_dim % 3
