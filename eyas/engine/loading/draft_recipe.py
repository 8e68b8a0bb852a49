"""Every kernel that a draft worker of this configuration launches, as a recipe of `kernels.launch.warm`.

As in `eyas.engine.loading.recipe` the worker itself is the list: its head is put together on the device
"meta", and batches of every size go through its programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from eyas.common.config import EngineConfig
from eyas.common.types import KvKind
from eyas.engine.attention.device import chunk_tile_rows
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.device.buckets import default_batches
from eyas.engine.kernels.exchange import row_ring
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.skinny import MAX_ROWS
from eyas.engine.loading.draft_build import batch_sizes, draft_state
from eyas.engine.loading.recipe import MetaSpec, wide_rows
from eyas.engine.speculation.draft_worker.batch_inputs import BatchLayout, BatchMemory
from eyas.engine.speculation.draft_worker.device_runner import MOST_PASSES
from eyas.engine.speculation.draft_worker.short_runs import DraftState, ShortProgram, short_layout

NARROWEST = 16
"""Rows of the smallest product by tiles: those of others are twice as many each time."""


@torch.inference_mode()
def launches(config: EngineConfig) -> None:
    """Launches what a draft worker with `config`, for a GPU, may launch; its pages do not matter."""
    loaded, state = draft_state(MetaSpec.of(dataclasses.replace(config, device="meta", num_pages=1)))
    sizes = sorted({*batch_sizes(config), *default_batches(config.max_running)})
    for batch in sizes:
        layout = short_layout(batch, state.proposer.path_rows)
        ShortProgram(state, layout, *_memory(state, layout, 1 + 2 * state.tables.drafts.shape[1])).run()
    decoder = loaded.decoder(KvKind.DRAFT)
    for rows in _long(state, decoder, config.context_length or decoder.context_length):
        _run(state, rows, cdiv(rows, chunk_tile_rows(decoder)))


def _memory(state: DraftState, layout: BatchLayout, words: int) -> tuple[BatchMemory, torch.Tensor]:
    """A program's input memory, and the place for `words` of each sequence's result."""
    results = torch.empty(layout.batch, words, dtype=torch.int32, device=state.device)
    return BatchMemory.of(layout, state.width, state.device), results


def _long(state: DraftState, decoder: ModelConfig, most: int) -> Iterator[int]:
    """Rows of runs that are not short: of each size of product, then those of prompts."""
    first = MOST_PASSES * state.proposer.path_rows + 1
    yield from (rows for rows in (first, *_sizes()) if first <= rows)
    yield from wide_rows(decoder, most)


def _sizes() -> Iterator[int]:
    rows = NARROWEST
    while rows <= MAX_ROWS:
        yield rows
        rows *= 2


def _run(state: DraftState, rows: int, tiles: int) -> None:
    """A long run of one sequence, some of whose features come from a ring."""

    def words(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=state.device)

    features = torch.empty(rows, state.width, dtype=state.proposer.pool.shape.dtype, device=state.device)
    row_ring.take(words(2, rows).long(), words(rows).long(), features, words(1))
    inputs = ForwardRows(words(rows), words(rows), words(rows), tiles=words(tiles, 4), firsts=state.firsts)
    state.proposer.draft(features, inputs, words(1), words(1), state.proposer.spec)
