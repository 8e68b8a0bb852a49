"""Keys and values in FP8: each row of a head has a scale, and what is stored follows from that row alone.

So it has the same bits whatever is written beside it, before it or after it. A number times its row's scale
is what was written, to within one part in 16.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from eyas.common.wire.pool import SCALE_BYTES

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

_LEAST = 1e-30  # of a row's largest: a row of zeros has a scale too
_Place: TypeAlias = tuple[torch.Tensor | slice, ...]


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., dim] -> e4m3 of that shape, and the scales that multiply them, float32 [...].

    A scale is its row's largest / 448; a number is the nearest of e4m3, of two the even one.
    """
    wide = rows.float()
    scales = wide.abs().amax(-1).clamp(min=_LEAST) / wide.new_tensor(LARGEST)
    return (wide / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FP8), scales


def scales_per_row(head_dim: int) -> int:
    """How many scales there are in a head's part of one row of scales."""
    return head_dim // SCALE_BYTES


class PageScales:
    """The scales in `pages` [pages, layers, rows of a layer, heads, dim] of FP8, `page_size` slots each.

    They lie in the rows behind those of both fields, as `eyas.common.wire.pool.scale_rows` says.
    """

    def __init__(self, pages: torch.Tensor, page_size: int) -> None:
        self._page_size = page_size
        self._each = scales_per_row(pages.shape[-1])
        self._scales = pages[:, :, 2 * page_size :].view(torch.float32)

    def write(self, layer: int, field: int, page: torch.Tensor, slot: torch.Tensor, x: torch.Tensor) -> None:
        """Stores x float32 [n, heads] for the rows `slot` of `page`, both int64 [n], in one layer."""
        number = field * self._page_size + slot
        self._scales[:, layer][page, number // self._each, :, number % self._each] = x

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies the scales of physical rows int64 [n], of both fields and in all layers."""
        self._scales[self._places(dst)] = self._scales[self._places(src)]

    def cleanse(self, pages: torch.Tensor) -> None:
        """Takes NaN and infinity out of the scales of `pages` int64 [n]."""
        self._scales[pages] = self._scales[pages].nan_to_num_(0.0, 0.0, 0.0)

    def _places(self, rows: torch.Tensor) -> _Place:
        page, slot = rows // self._page_size, rows % self._page_size
        number = slot[:, None] + self._page_size * torch.arange(2, device=rows.device)
        return page[:, None], slice(None), number // self._each, slice(None), number % self._each
