"""What one layer keeps of a token: the fields of a slot, their bytes, and how ranks divide them.

The pool's shape, the transfer's geometry and tensor parallelism read it; it knows sizes, neither tensors nor
pages. Keys and values per head are the one format there is.
"""

from __future__ import annotations

import dataclasses

from eyas.common.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """A key and a value of `head_dim` elements for each of `kv_heads` heads, in each of `layers` layers."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def slot(self) -> tuple[int, int, int]:
        """What one layer keeps of one token: fields (key, value), heads, elements."""
        return 2, self.kv_heads, self.head_dim

    def row_bytes(self, itemsize: int) -> int:
        """Of one token in all layers, with elements of `itemsize` bytes."""
        fields, heads, elements = self.slot
        return self.layers * fields * heads * elements * itemsize

    def of_rank(self, ranks: int) -> KvFormat:
        """One rank's share: its heads, of every layer. ConfigError if they cannot be divided."""
        if self.kv_heads % ranks:
            raise ConfigError(f"{self.kv_heads} key and value heads cannot be divided among {ranks} ranks")
        return dataclasses.replace(self, kv_heads=self.kv_heads // ranks)
