"""The shares of heads of two engines' ranks: which rank has what of which other rank's.

Rank r of n has heads r * heads / n to (r + 1) * heads / n; or each has everything, as of latents. Pure maths
of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadShare:
    """`heads` of them lie from head `theirs` on at the peer's rank, and from head `ours` on at our `rank`."""

    rank: int
    theirs: int
    ours: int
    heads: int


def shares(peer_rank: int, peer_heads: int, our_heads: int, our_ranks: int) -> list[HeadShare]:
    """Returns our ranks' shares of one peer's rank; heads are per rank of each side."""
    first = peer_rank * peer_heads
    parts = []
    for rank in range(our_ranks):
        start = max(first, rank * our_heads)
        end = min(first + peer_heads, (rank + 1) * our_heads)
        if start < end:
            parts.append(HeadShare(rank, start - first, start - rank * our_heads, end - start))
    return parts


def replicas(peer_rank: int, peer_ranks: int, heads: int, our_ranks: int) -> list[HeadShare]:
    """Returns our ranks that take all `heads` of one peer's rank, where every rank has them all: each takes
    them of one, and the peer's ranks take turns. There may be none.
    """
    return [
        HeadShare(rank, 0, 0, heads) for rank in range(our_ranks) if rank % max(peer_ranks, 1) == peer_rank
    ]
