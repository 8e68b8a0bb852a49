"""A model through which a sequence goes in any steps: whole chunks, single rows, chains; alone, or beside
others.

A position's logits are the same whatever the steps and the company, if its arithmetic is exact.
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

    `cublas`: on a GPU it has the products of many rows. `beside`: as many other sequences take the same
    steps, and stand before it in each.
    """

    def __init__(
        self,
        folder: Path,
        exact: bool,
        placement: WeightPlacement,
        group: ProcessGroup | None = None,
        cublas: bool = True,
        beside: int = 0,
    ) -> None:
        config, device = read_model(folder), placement.device
        self._device, random = device, torch.Generator().manual_seed(3)
        share = config_of_rank(config, placement.ranks)
        self._count = count = 1 + beside
        self._shape = PoolShape(share.kv_format, 1 + count * PAGES, PAGE, placement.dtype, device)
        if config.delta is not None:
            form = replace(share.kv_format, layers=page_layers(config.kv_groups))
            ring = ring_rows(MOST_ROWS)
            shape = config.delta.of_rank(placement.ranks)
            states = StateFormat(config.state_layers, shape, ring, placement.dtype)
            self._shape = replace(
                self._shape, format=form, groups=config.kv_groups, states=states, slots=count
            )
        own = torch.randperm(PAGES, generator=random).int()
        self._table = (own + PAGES * torch.arange(count - 1, -1, -1, dtype=torch.int32)[:, None]).to(
            device
        ) + 1
        latent = bool(share.kv_format.latent)
        kinds = (PagedLatents, ExactLatents) if latent else (PagedAttention, ExactAttention)
        attention = kinds[exact](self._table, share.num_heads, self._shape, RowLimits(count, 8), pdl=False)
        launch = replace(skinny.ProductLaunch.on(device, False, exact), cublas=cublas and device != "cpu")
        group = group or ProcessGroup(RankInfo(), device)
        context = LayerContext.on(device, config, group, launch, attention)
        with FolderWeights(
            folder, config.spelling, placement, quantized=config.quantized, fused=config.fused
        ) as weights:
            self._model = Decoder(config, weights, DeviceMachine(context))
        self._tile = chunk_tile_rows(share)
        own = torch.randint(config.vocab_size, (PAGES * PAGE,), generator=random)
        others = torch.randint(config.vocab_size, (beside, PAGES * PAGE), generator=random)
        self._tokens = self._ints(torch.cat((others, own[None])))

    @property
    def layers(self) -> Sequence[DecoderLayer[Any]]:
        """Of the decoder."""
        return self._model.layers

    def logits(self, steps: Sequence[Step]) -> dict[int, torch.Tensor]:
        """Of the one sequence, by position; a step is a chunk, or rows that decode, with its number of
        tokens.
        """
        pool, done = KvPool(self._shape), 0
        found: dict[int, torch.Tensor] = {}
        if pool.states is not None:
            pool.states.beside = SolvedStore.on(pool.states)
        self._bound = 0
        for kind, count in steps:
            with torch.inference_mode():
                x, _ = self._model.forward(self._rows(kind, done, count), pool)
                found |= dict(enumerate(self._model.logits(x)[-count:], done))
            done += count
        return found

    def _rows(self, kind: str, done: int, count: int) -> ForwardRows:
        places, sequences = torch.arange(done, done + count, device=self._device), range(self._count)
        tiles = [
            (sequence, sequence * count + i, done + i, min(self._tile, count - i))
            for sequence in sequences
            for i in range(0, count, self._tile)
        ]
        rounds = None
        if kind == ROWS:
            rounds = DecodeRows(self._ints(sequences), self._ints([done] * self._count), count)
        return ForwardRows(
            states=self._states(kind, done, count),
            tokens=self._tokens[:, done : done + count].contiguous().flatten(),
            positions=self._ints(places).repeat(self._count),
            kv_rows=self._ints(self._table[:, places // PAGE] * PAGE + places % PAGE).flatten(),
            rounds=rounds,
            tiles=self._ints(tiles) if kind == CHUNK else None,
        )

    def _states(self, kind: str, done: int, count: int) -> StateGroups | None:
        """The rows for layers with states, which stand behind all rows of chunks, or before a round."""
        if self._shape.states is None:
            return None
        bound, end, sequences = self._bound, done + count, self._count
        self._bound = (end if kind == CHUNK else done) // SPAN * SPAN
        slots, firsts = [*range(sequences)], [*range(0, sequences * count, count)]
        every = ([each] * sequences for each in (count, done, bound, self._bound))
        of_rows = ([*part] * sequences for part in (range(done - 1, end - 1), range(done, end)))
        rows = StateRows(*map(self._ints, (slots, firsts, *every, *of_rows)), most=count)
        if kind == ROWS:
            return StateGroups(rows, None, None, None, None)
        chunks = Chunks.of([bound] * sequences, [end] * sequences, self._device)
        return StateGroups(None, None, rows, chunks.chunks, chunks.ends)

    def _ints(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._device)
