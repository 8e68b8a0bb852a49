"""Heads that are shared among unequal numbers of ranks: every head arrives once, where it belongs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import shares

RANKS = st.sampled_from([1, 2, 4, 8, 3, 6])


@given(RANKS, RANKS, st.integers(1, 4))
def test_all_heads_arrive_once_and_in_place(peers: int, ranks: int, each: int) -> None:
    heads = peers * ranks * each
    theirs = [list(range(heads))[r * heads // peers : (r + 1) * heads // peers] for r in range(peers)]
    ours: list[list[int | None]] = [[None] * (heads // ranks) for _ in range(ranks)]
    for peer in range(peers):
        for share in shares(peer, heads // peers, heads // ranks, ranks):
            for i in range(share.heads):
                assert ours[share.rank][share.ours + i] is None
                ours[share.rank][share.ours + i] = theirs[peer][share.theirs + i]
    assert [head for rank in ours for head in rank] == list(range(heads))


def test_equal_ranks_take_whole_pages_from_their_own_like() -> None:
    (share,) = shares(peer_rank=2, peer_heads=4, our_heads=4, our_ranks=4)
    assert (share.rank, share.theirs, share.ours, share.heads) == (2, 0, 0, 4)
