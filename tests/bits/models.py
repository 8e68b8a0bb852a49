"""A model whose one sequence goes through it in any steps: whole chunks, single rows, chains.

A position's logits are the same whatever the steps, if its arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.engine.attention.device import chunk_tile_rows
from eyas.engine.attention.exact_latents import ExactLatents
from eyas.engine.attention.exact_rows import ExactAttention
from eyas.engine.attention.latent import PagedLatents
from eyas.engine.attention.rows import PagedAttention, RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.states.prompts import Chunks
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.kv.groups import page_layers
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.device_step import LayerContext
from eyas.engine.models.table import read_model
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.parallel.shards import config_of_rank
from eyas.engine.states.rows import StateGroups, StateRows
from eyas.engine.states.shape import SPAN, ring_rows
from eyas.engine.states.store import StateFormat

PAGE, PAGES, MOST_ROWS = 16, 40, 16
CHUNK, ROWS = "chunk", "rows"
Step = tuple[str, int]


class Model:
    """A model of 16 bits and a sequence of random ids, on the CPU or the GPU; or `group`'s share of one.

    `cublas`: on a GPU it has the products of many rows.
    """

    def __init__(
        self,
        folder: Path,
        exact: bool,
        placement: WeightPlacement,
        group: ProcessGroup | None = None,
        cublas: bool = True,
    ) -> None:
        config, device = read_model(folder), placement.device
        self._device, random = device, torch.Generator().manual_seed(3)
        share = config_of_rank(config, placement.ranks)
        self._shape = PoolShape(share.kv_format, 1 + PAGES, PAGE, placement.dtype, device)
        if config.delta is not None:
            form = replace(share.kv_format, layers=page_layers(config.kv_groups))
            ring = ring_rows(MOST_ROWS)
            shape = config.delta.of_rank(placement.ranks)
            states = StateFormat(config.state_layers, shape, ring, placement.dtype)
            self._shape = replace(self._shape, format=form, groups=config.kv_groups, states=states, slots=1)
        self._table = torch.randperm(PAGES, generator=random).int()[None].to(device) + 1
        latent = bool(share.kv_format.latent)
        kinds = (PagedLatents, ExactLatents) if latent else (PagedAttention, ExactAttention)
        attention = kinds[exact](self._table, share.num_heads, self._shape, RowLimits(1, 8), pdl=False)
        launch = replace(skinny.ProductLaunch.on(device, False, exact), cublas=cublas and device != "cpu")
        group = group or ProcessGroup(RankInfo(), device)
        context = LayerContext.on(device, config, group, launch, attention)
        with FolderWeights(
            folder, config.spelling, placement, quantized=config.quantized, fused=config.fused
        ) as weights:
            self._model = Decoder(config, weights, DeviceMachine(context))
        self._tile = chunk_tile_rows(share)
        self._tokens = self._ints(torch.randint(config.vocab_size, (PAGES * PAGE,), generator=random))

    @property
    def layers(self) -> Sequence[DecoderLayer[Any]]:
        """Of the decoder."""
        return self._model.layers

    def logits(self, steps: Sequence[Step]) -> dict[int, torch.Tensor]:
        """By position; a step is a chunk, or rows that decode, with its number of tokens."""
        pool, done, found = KvPool(self._shape), 0, {}
        if pool.states is not None:
            pool.states.beside = SolvedStore.on(pool.states)
        self._bound = 0
        for kind, count in steps:
            with torch.inference_mode():
                x, _ = self._model.forward(self._rows(kind, done, count), pool)
                found |= dict(enumerate(self._model.logits(x), done))
            done += count
        return found

    def _rows(self, kind: str, done: int, count: int) -> ForwardRows:
        places = torch.arange(done, done + count, device=self._device)
        tiles = [(0, i, done + i, min(self._tile, count - i)) for i in range(0, count, self._tile)]
        rounds = DecodeRows(self._ints([0]), self._ints([done]), count) if kind == ROWS else None
        return ForwardRows(
            states=self._states(kind, done, count),
            tokens=self._tokens[done : done + count],
            positions=self._ints(places),
            kv_rows=self._ints(self._table[0, places // PAGE] * PAGE + places % PAGE),
            rounds=rounds,
            tiles=self._ints(tiles) if kind == CHUNK else None,
        )

    def _states(self, kind: str, done: int, count: int) -> StateGroups | None:
        """The rows for layers with states, which stand behind all rows of chunks, or before a round."""
        if self._shape.states is None:
            return None
        bound, end = self._bound, done + count
        self._bound = (end if kind == CHUNK else done) // SPAN * SPAN
        numbers = ([0], [0], [count], [done], [bound], [self._bound], range(done - 1, end - 1))
        rows = StateRows(*map(self._ints, (*numbers, range(done, end))), most=count)
        if kind == ROWS:
            return StateGroups(rows, None, None, None, None)
        chunks = Chunks.of([bound], [end], self._device)
        return StateGroups(None, None, rows, chunks.chunks, chunks.ends)

    def _ints(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._device)
