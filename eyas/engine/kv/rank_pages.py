"""One rank's pages by their heads: some heads of some pages, gathered and scattered on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.common.types import PageShare
from eyas.engine.kv.pool import PoolShape

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PagesByHeads:
    """`pages` [pages, elements of a page] of a pool of that shape, the proof page too; `whole`: as bytes.

    A part of a page has the rows of heads in their order, and in each of them the heads of the share: uint8
    [page rows, heads, bytes of a head], flat.
    """

    def __init__(self, pages: torch.Tensor, shape: PoolShape) -> None:
        self.whole = pages.view(torch.uint8)
        self.stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None
        geometry = shape.geometry
        self.head_bytes, self.rows, self.heads = geometry.head_bytes, geometry.page_rows, geometry.kv_heads
        self.word = next(word for word in _WORDS if self.head_bytes % word.itemsize == 0)
        self._heads = self.whole.view(self.word).unflatten(1, (geometry.page_rows, geometry.kv_heads, -1))

    def is_whole(self, share: PageShare) -> bool:
        """Whether a share is all of a page."""
        return share.heads in (0, self.heads)

    def part_bytes(self, share: PageShare) -> int:
        """Bytes of each page that are of a share."""
        return self.rows * share.heads * self.head_bytes if share.heads else self.whole.shape[1]

    def gather(self, pages: Sequence[int], share: PageShare) -> torch.Tensor:
        """uint8 [len(pages), bytes of a part], on the device."""
        parts: torch.Tensor = self._of(share).index_select(0, self.index(pages))
        return parts.flatten(1).view(torch.uint8)

    def scatter(self, parts: torch.Tensor, pages: Sequence[int], share: PageShare) -> None:
        """Stores parts uint8 [len(pages), bytes], which are on the device; the other heads stay as they
        are.
        """
        heads = self._of(share)
        words = parts.view(self.word).unflatten(1, heads.shape[1:])
        heads.index_copy_(0, self.index(pages), words)

    def index(self, numbers: Sequence[int]) -> torch.Tensor:
        """int64 [n], on the device."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.whole.device)

    def _of(self, share: PageShare) -> torch.Tensor:
        heads: torch.Tensor = self._heads[:, :, share.first : share.first + share.heads]
        return heads
