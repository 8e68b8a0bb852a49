"""The spans of a step as layers with a state read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.states.rows import StateRows


def state_rows(spans: Sequence[QuerySpan], device: str) -> StateRows | None:
    """The rows of the spans, one after the other; None: they have no states."""
    places = [span.state for span in spans if span.state is not None]
    if not places:
        return None
    before, positions = zip(*(way for span in spans for way in _ways(span)), strict=True)
    counts = [span.count for span in spans]

    def words(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return StateRows(
        slots=words([place.slot for place in places]),
        firsts=words([sum(counts[:i]) for i in range(len(counts))]),
        counts=words(counts),
        starts=words([span.start for span in spans]),
        bounds=words([place.bound for place in places]),
        folds=words([place.fold for place in places]),
        before=words(before),
        positions=words(positions),
        most=max(counts),
        stays=tuple(place.stay for place in places),
    )


def _ways(span: QuerySpan) -> Iterator[tuple[int, int]]:
    """Yields for each query the row before it on its path, and its position."""
    if span.paths is None:
        return ((row - 1, row) for row in range(span.start, span.start + span.count))
    ways = ((span.start - 1, *path) for path in span.paths)
    return ((way[-2], span.start + len(way) - 2) for way in ways)
