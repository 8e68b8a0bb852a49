"""The rows of one forward: their tokens and positions, where they are written, and what they attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.batch.spans import QuerySpan


@dataclass(frozen=True)
class ForwardBatch:
    """R rows. `kv_rows`: the physical row (page * page_size + slot) that each one writes. All int64 [R].

    `depth`: how far a draft head's rows stand below the certain ones; 0: they are certain.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    kv_rows: torch.Tensor
    plan: AttentionPlan
    spans: Sequence[QuerySpan]
    depth: int = 0


def build_batch(
    spans: Sequence[QuerySpan],
    tokens: Sequence[int],
    page_size: int,
    backend: AttentionBackend,
    depth: int = 0,
) -> ForwardBatch:
    """A forward of the spans' rows, in order, one token per row. `depth`: of all of them."""
    positions: list[int] = []
    kv_rows: list[int] = []
    for span in spans:
        for row, position in _rows(span):
            positions.append(span.offset + position)
            kv_rows.append(span.pages[row // page_size] * page_size + row % page_size)
    if len(positions) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for {len(positions)} rows")
    return ForwardBatch(
        tokens=torch.tensor(tokens, device=backend.device),
        positions=torch.tensor(positions, device=backend.device),
        kv_rows=torch.tensor(kv_rows, device=backend.device),
        plan=backend.plan(spans),
        spans=spans,
        depth=depth,
    )


def _rows(span: QuerySpan) -> Iterator[tuple[int, int]]:
    """(logical row, place on its path) of each query: a tree node stands where its path ends."""
    if span.paths is None:
        return ((row, row) for row in range(span.start, span.start + span.count))
    return ((path[-1], span.start + len(path) - 1) for path in span.paths)
