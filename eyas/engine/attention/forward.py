"""The rows of one forward: their tokens and positions, where they are written, and what they attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.batch.state_spans import state_rows
from eyas.engine.states.rows import StateRows


@dataclass(frozen=True)
class GroupRows:
    """The rows of a forward in one group of layers. `kv_rows` int64 [R]: the physical row (page * page_size +
    slot) that each one writes.
    """

    kv_rows: torch.Tensor
    plan: AttentionPlan


@dataclass(frozen=True)
class ForwardBatch:
    """R rows, `tokens` and `positions` int64 [R]. `groups`: what they write and see in each group of layers.

    `depth`: how far a draft head's rows stand below the certain ones; 0: they are certain. `states`: the same
    rows for layers with states, if there are some. `adapters`: of each slot of an adapter that rows have,
    their numbers, int64.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupRows, ...]
    spans: Sequence[QuerySpan]
    depth: int = 0
    states: StateRows | None = None
    adapters: Sequence[tuple[int, torch.Tensor]] = ()


def build_batch(
    spans: Sequence[QuerySpan],
    tokens: Sequence[int],
    page_size: int,
    backend: AttentionBackend,
    depth: int = 0,
) -> ForwardBatch:
    """A forward of the spans' rows, in order, one token per row. `depth`: of all of them."""
    positions = [span.offset + position for span in spans for _, position in _rows(span)]
    if len(positions) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for {len(positions)} rows")
    return ForwardBatch(
        tokens=torch.tensor(tokens, device=backend.device),
        positions=torch.tensor(positions, device=backend.device),
        groups=tuple(_in_groups(spans, page_size, backend)),
        spans=spans,
        depth=depth,
        states=state_rows(spans, backend.device),
        adapters=rows_of_adapters(spans, backend.device),
    )


def rows_of_adapters(
    spans: Sequence[QuerySpan], device: str | torch.device
) -> list[tuple[int, torch.Tensor]]:
    """The rows of each slot of an adapter."""
    slots = [span.adapter for span in spans]
    if not any(slots):
        return []
    rows = torch.tensor(slots).repeat_interleave(torch.tensor([span.count for span in spans]))
    return [(slot, (rows == slot).nonzero()[:, 0].to(device)) for slot in rows.unique().tolist() if slot]


def _in_groups(spans: Sequence[QuerySpan], page_size: int, backend: AttentionBackend) -> Iterator[GroupRows]:
    for group in range(backend.groups):
        own = [span.in_group(group) for span in spans] if group else spans
        kv_rows = [
            span.pages[row // page_size] * page_size + row % page_size
            for span in own
            for row, _ in _rows(span)
        ]
        yield GroupRows(torch.tensor(kv_rows, device=backend.device), backend.plan(own, group))


def _rows(span: QuerySpan) -> Iterator[tuple[int, int]]:
    """(logical row, place on its path) of each query: a tree node stands where its path ends."""
    if span.paths is None:
        return ((row, row) for row in range(span.start, span.start + span.count))
    return ((path[-1], span.start + len(path) - 1) for path in span.paths)
