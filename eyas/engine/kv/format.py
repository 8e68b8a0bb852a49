"""The KV of one token in one layer: the fields of a slot, their bytes, and how ranks divide them.

The pool's shape, the transfer's geometry and tensor parallelism read it. There are two kinds: a key and a
value for each head, and one row per token that all heads share. Elements of one byte have a scale for each
key, and for each value, of every head; latents have none.
"""

from __future__ import annotations

import dataclasses

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import scale_rows


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """A key and a value of `head_dim` elements for each of `kv_heads` heads, in each of `layers` layers.

    `latent`: if it is not 0, a head has no value of its own: the first `latent` elements of its key are it
    (latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1).
    """

    layers: int
    kv_heads: int
    head_dim: int
    latent: int = 0

    @property
    def slot(self) -> tuple[int, int, int]:
        """The cache of one token in one layer: fields (key, value; or both in one), heads, elements."""
        return 1 if self.latent else 2, self.kv_heads, self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.latent or self.head_dim

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Bytes of `page_size` tokens in all layers, with elements of `itemsize` bytes, and their scales."""
        fields, heads, elements = self.slot
        rows = fields * page_size + self.scale_rows(page_size, itemsize)
        return self.layers * rows * heads * elements * itemsize

    def scale_rows(self, page_size: int, itemsize: int) -> int:
        """Rows behind those of each layer of a page, which have its scales, see `scale_rows`; 0: none."""
        fields, _, elements = self.slot
        return scale_rows(fields, page_size, elements, itemsize)

    def of_rank(self, ranks: int) -> KvFormat:
        """One rank's share: its heads, of every layer; of latents everything, since all heads read them.

        Raises ConfigError if the heads cannot be divided.
        """
        if self.latent:
            return self
        if self.kv_heads % ranks:
            raise ConfigError(f"{self.kv_heads} key and value heads cannot be divided among {ranks} ranks")
        return dataclasses.replace(self, kv_heads=self.kv_heads // ranks)
