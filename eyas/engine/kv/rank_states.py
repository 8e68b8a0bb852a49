"""One rank's slots of recurrent states by their heads: what a share of these has of a slot, in one row."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from eyas.common.types import PageShare
from eyas.engine.states.store import StateStore


class StatesByHeads:
    """Slots of `store`, of a rank with `kv_heads` KV heads: a share of these is the same share of key and
    value heads. What it has of a slot does not depend on how many heads its rank has beside it.
    """

    def __init__(self, store: StateStore, kv_heads: int) -> None:
        self._parts = store.parts
        self._shape = store.format.shape
        self._kv_heads = kv_heads

    def read(self, slot: int, share: PageShare, room: int) -> torch.Tensor:
        """uint8 [room]: the share's bytes of a slot, and zeros behind them."""
        row = torch.cat([part.reshape(-1).view(torch.uint8) for part in self._of(slot, share)])
        return torch.nn.functional.pad(row, (0, room - row.shape[0]))

    def write(self, slot: int, share: PageShare, row: torch.Tensor) -> None:
        """Stores what `read` gave, here or at another rank."""
        first = 0
        for part in self._of(slot, share):
            count = part.numel() * part.itemsize
            part.copy_(row[first : first + count].view(part.dtype).view(part.shape))
            first += count

    def _of(self, slot: int, share: PageShare) -> Iterator[torch.Tensor]:
        """Views of the share's parts of a slot, of all layers each."""
        shape, parts = self._shape, self._parts
        (key, keys), (value, values) = (
            self._range(share, shape.key_heads),
            self._range(share, shape.value_heads),
        )
        yield parts["states"][slot, :, value : value + values]
        first = 0
        for count in shape.gate_counts:
            each = count // shape.value_heads
            yield parts["gates"][slot, :, :, first + value * each : first + (value + values) * each]
            first += count
        for name in ("tails", "inputs"):
            yield from self._columns(parts[name][slot], key, keys, value, values)

    def _columns(
        self, rows: torch.Tensor, key: int, keys: int, value: int, values: int
    ) -> Iterator[torch.Tensor]:
        """Yields queries, keys and values of some heads, from rows [.., inputs]."""
        shape, first = self._shape, 0
        for begin, count, heads, size in (
            (key, keys, shape.key_heads, shape.key_size),
            (key, keys, shape.key_heads, shape.key_size),
            (value, values, shape.value_heads, shape.value_size),
        ):
            yield rows[..., first + begin * size : first + (begin + count) * size]
            first += heads * size

    def _range(self, share: PageShare, heads: int) -> tuple[int, int]:
        """The first of `heads` that are of a share, and how many."""
        return share.first * heads // self._kv_heads, share.heads * heads // self._kv_heads
