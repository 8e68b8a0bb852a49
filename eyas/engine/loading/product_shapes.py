"""The products of a model for which a start searches tiles: those whose time is that of their weights.

It knows specifications alone, and loads without torch, so that a start knows at once whether tables have all
of them. What formats of four bits and latents multiply by has `eyas tune`, and the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from eyas.engine.checkpoint.config import ExpertsSpec, LayerSpec, ModelConfig
from eyas.engine.kernels.experts import grouped_tiles
from eyas.engine.kernels.experts.grouped_tiles import GroupedShape
from eyas.engine.kernels.products.skinny_tiles import MEASURED, PACKED_TILES, Key, ProductShape
from eyas.engine.parallel.shards import config_of_rank

ROWS = (16, 32)
"""Padded rows of a step whose dense products are searched; larger ones follow the rule."""

EXPERT_ROWS = (1, 8, 32)
LEAST = 4 << 20
"""Numbers of a weight: a smaller one is read from the cache, or in a time that no tile changes."""

_FUSED = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class DenseProduct:
    """A product of few rows with a weight of 16 bits. `heads`: of q, of k and v, and the elements of each, if
    it is that of q, k and v in one.
    """

    shape: ProductShape
    heads: tuple[int, int, int] = (0, 0, 0)

    @property
    def key(self) -> Key:
        """Its tile's, in a table."""
        return self.shape.kind, self.shape.rows, self.shape.n, self.shape.k


@dataclass(frozen=True)
class ExpertProducts:
    """Gate and up of all experts, and down, for `rows` rows that take `per_row` each."""

    shapes: tuple[GroupedShape, GroupedShape]
    per_row: int
    rows: int

    @property
    def keys(self) -> tuple[grouped_tiles.Key, ...]:
        """Their tiles', in a table."""
        return tuple(grouped_tiles.key_of(shape, self.rows * self.per_row) for shape in self.shapes)


@dataclass(frozen=True)
class SearchedProducts:
    """Products whose tiles are to be searched, those of the fewest rows first."""

    dense: tuple[DenseProduct, ...]
    experts: tuple[ExpertProducts, ...]

    def __len__(self) -> int:
        return len(self.dense) + len(self.experts)

    @classmethod
    def of(cls, model: ModelConfig, ranks: int) -> SearchedProducts:
        """The products of one rank's share."""
        config = config_of_rank(model, ranks)
        plain = config.quantized is None
        dense = dict.fromkeys(_dense(config, model.vocab_size // ranks)) if plain else {}
        experts = dict.fromkeys(_experts(config))
        return cls(
            tuple(sorted(dense, key=lambda each: each.shape.rows)),
            tuple(sorted(experts, key=lambda each: each.rows)),
        )

    def without(
        self, dense: Mapping[Key, object], experts: Mapping[grouped_tiles.Key, object]
    ) -> SearchedProducts:
        """The products that have no tile in these tables."""
        return SearchedProducts(
            tuple(each for each in self.dense if each.key not in dense),
            tuple(each for each in self.experts if not all(key in experts for key in each.keys)),
        )

    def untuned(self, device: str) -> SearchedProducts:
        """The products for which an engine on `device` has only a rule."""
        dense = {**MEASURED, **PACKED_TILES.measured(device)}
        return self.without(dense, grouped_tiles.TILES.measured(device))


def _dense(config: ModelConfig, vocabulary: int) -> Iterator[DenseProduct]:
    """Yields the products of layers, and of the output head."""
    for layer in config.layers:
        mixers = (*_state(layer, config.hidden_size), *_attention(layer, config.hidden_size))
        for n, k, kind, heads in (*mixers, *_feed_forward(layer, config)):
            for rows in ROWS:
                span = heads[2] if kind in ("qkv", "heads") else n
                if n * k >= LEAST:
                    yield DenseProduct(ProductShape(kind, rows, n, k, span), heads)
    for rows in ROWS:
        if vocabulary % 16 == 0 and vocabulary * config.hidden_size >= LEAST:
            shape = ProductShape("linear", rows, vocabulary, config.hidden_size, vocabulary)
            yield DenseProduct(shape)


_Sizes = tuple[int, int, str, tuple[int, int, int]]


def _state(layer: LayerSpec, hidden: int) -> Iterator[_Sizes]:
    delta, none = layer.delta, (0, 0, 0)
    if delta is not None:
        inner = delta.value_heads * delta.value_size
        yield delta.weights(hidden) // hidden - inner + delta.spare_rows, hidden, "linear", none
        yield hidden, inner, "linear", none


def _attention(layer: LayerSpec, hidden: int) -> Iterator[_Sizes]:
    spec, none = layer.attention, (0, 0, 0)
    if spec.latent or not layer.attends:
        return
    heads, own, dim = spec.num_heads, spec.num_kv_heads if spec.shared_from is None else 0, spec.head_dim
    apart = spec.row_norms or spec.centred_heads or spec.value_norms or spec.gated or not own
    normed = (spec.head_norms and not spec.norms_behind) or spec.bare_norms
    kind = "linear" if apart else "heads" if normed else "qkv"
    rows = (heads * (1 + spec.gated) + 2 * own) * dim
    yield rows, hidden, kind, none if apart else (heads, own, dim)
    yield hidden, heads * dim, "linear", none


def _feed_forward(layer: LayerSpec, config: ModelConfig) -> Iterator[_Sizes]:
    spec, none = layer.feed_forward, (0, 0, 0)
    width = spec.shared_width if isinstance(spec, ExpertsSpec) else spec.width
    if isinstance(spec, ExpertsSpec) and spec.with_shared[0] > spec.experts:
        width = 0  # it stands among the experts
    if width:
        fused = spec.gated and not spec.bias and spec.activation in _FUSED
        n = width * (2 if spec.gated else 1)
        yield n, config.hidden_size, "gated" if fused else "linear", none
        yield config.hidden_size, width, "linear", none


def _experts(config: ModelConfig) -> Iterator[ExpertProducts]:
    """Yields the products of experts in 16 bits or in FP8 blocks."""
    quantized, hidden = config.quantized, config.hidden_size
    if quantized is not None and quantized.rows != "block":
        return
    itemsize = 2 if quantized is None else 1
    for layer in config.layers:
        spec = layer.feed_forward
        if isinstance(spec, ExpertsSpec) and spec.gated:
            experts, per_row = spec.with_shared
            up = GroupedShape(experts, 2 * spec.width, hidden, True, itemsize)
            down = GroupedShape(experts, hidden, spec.width, False, itemsize)
            for rows in EXPERT_ROWS:
                yield ExpertProducts((up, down), per_row, rows)
