"""Spans as four compressed integer arrays, the form in which paged kernels take a batch of prompt chunks; and
the copy of such arrays to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.engine.batch.spans import QuerySpan
from kv_transfer.layout import pages_for


@dataclass(frozen=True)
class PageLists:
    """All int32. Span i has the query rows queries[i] .. queries[i + 1] - 1 of the step, and the pages
    pages[first_page[i] : first_page[i + 1]], the last of which holds last_rows[i] of its rows, at least one.
    """

    queries: np.ndarray  # [spans + 1]
    first_page: np.ndarray  # [spans + 1]
    pages: np.ndarray
    last_rows: np.ndarray  # [spans]


def page_lists(spans: Sequence[QuerySpan], page_size: int) -> PageLists:
    """The pages that hold the rows 0 .. start + count - 1 of each causal span; none of them is empty."""
    ends = np.array([span.start + span.count for span in spans], np.int32)
    used = [np.asarray(s.pages[: pages_for(s.start + s.count, page_size)], np.int32) for s in spans]
    return PageLists(
        queries=_starts([span.count for span in spans]),
        first_page=_starts([len(pages) for pages in used]),
        pages=np.concatenate(used),
        last_rows=(ends - 1) % page_size + 1,
    )


def on_device(array: np.ndarray, device: str) -> torch.Tensor:
    """A copy there, from pinned memory: one from plain memory would wait for the stream."""
    tensor = torch.from_numpy(array)
    if not device.startswith("cuda"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _starts(counts: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.int32)
