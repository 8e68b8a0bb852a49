"""The KV of one token in one layer: the fields of a slot, their bytes, and how ranks divide them.

The pool's shape, the transfer's geometry and tensor parallelism read it. There are two kinds: a key and a
value for each head, and one row per token that all heads share.
"""

from __future__ import annotations

import dataclasses

from eyas.common.errors import ConfigError


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

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of one token in all layers, with elements of `itemsize` bytes."""
        fields, heads, elements = self.slot
        return self.layers * fields * heads * elements * itemsize

    def of_rank(self, ranks: int) -> KvFormat:
        """One rank's share: its heads, of every layer; of latents everything, since all heads read them.

        Raises ConfigError if the heads cannot be divided.
        """
        if self.latent:
            return self
        if self.kv_heads % ranks:
            raise ConfigError(f"{self.kv_heads} key and value heads cannot be divided among {ranks} ranks")
        return dataclasses.replace(self, kv_heads=self.kv_heads // ranks)
