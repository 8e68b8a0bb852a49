"""The choice of the attention rank that takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLACK = 4
"""For a prompt that it has cached, a rank may have this number more sequences than the idlest."""


class RankOffer(NamedTuple):
    """An offer of a rank: pages of the prompt that it has cached, sequences before it, and free pages."""

    cached: int
    sequences: int
    free: int


def choose(places: Sequence[RankOffer]) -> int:
    """The number of the rank that has most of the prompt, unless others have much less to do.

    Of equals, the one with the fewest sequences; then with the most room; then the first.
    """
    fewest = min(place.sequences for place in places)
    idle_enough = [rank for rank, place in enumerate(places) if place.sequences <= fewest + SLACK]

    def worth(rank: int) -> tuple[int, int, int]:
        place = places[rank]
        return place.cached, -place.sequences, place.free

    return max(idle_enough, key=worth)
