"""A model of the device path beside the plain one, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.engine.attention.device import chunk_tile_rows, row_attention
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.device_step import LayerContext
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from tests.unit.model_rig import Rig
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama

LAYERS = 2
CAPTURE = (1, 1, 2)  # of a head: a layer twice, and what leaves the last
SLOTS = 4
ERROR = 1e-4
FIRST = {"narrow": 20, "wide": skinny.MAX_ROWS - 8}
Placed = list[tuple[int, QuerySpan]]  # spans and their slots


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"layers": LAYERS, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96, "vocab": 128}
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target", tied=False, **sizes)


def write_head(folder: Path, target: Path, draft_vocab: int | None) -> Path:
    """A head that captures layers of so shallow a target; with a vocabulary of its own it norms them too."""
    head = write_tiny_eagle3(folder, target, draft_vocab=draft_vocab)
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in CAPTURE]}
    (head / "config.json").write_text(json.dumps(config))
    if draft_vocab is not None:
        stored = load_file(head / "model.safetensors")
        width = stored["norm.weight"].shape[0]
        gains = {f"fc_norm.{i}.weight": torch.rand(width) + 0.5 for i in range(len(CAPTURE))}
        save_file(stored | gains, head / "model.safetensors")
    return head


class Twin:
    """Pages and rows for a fused model, on the same pages as a plain one's spans."""

    def __init__(self, config: ModelConfig, pool: KvPool, tables: torch.Tensor) -> None:
        self.pool = KvPool(pool.shape)
        self.pool.tensor.fill_(float("nan"))
        self._tile = chunk_tile_rows(config)
        self._tables = tables
        attention = row_attention(
            tables, config.num_heads, pool.shape, RowLimits.of(config, SLOTS, 3), pdl=False
        )
        launch = skinny.ProductLaunch.on("cpu", pdl=False)
        self.context = LayerContext.on("cpu", config, ProcessGroup(RankInfo(), "cpu"), launch, attention)
        self.machine = DeviceMachine(self.context)

    def rows(self, rounds: Placed, chunks: Placed) -> ForwardRows:
        """Of tokens 0."""
        size, positions, kv_rows, tiles = self.pool.page_size, [], [], []
        for slot, span in (*rounds, *chunks):
            self._tables[slot, : len(span.pages)] = torch.tensor(span.pages, dtype=torch.int32)
            here = range(span.start, span.start + span.count)
            positions += here
            kv_rows += [span.pages[row // size] * size + row % size for row in here]
        first = 0
        for slot, span in chunks:
            for i in range(0, span.count, self._tile):
                tiles.append((slot, first + i, span.start + i, min(self._tile, span.count - i)))
            first += span.count
        slots, starts = int32([slot for slot, _ in rounds]), int32([span.start for _, span in rounds])
        return ForwardRows(
            int32([0] * len(positions)),
            int32(positions),
            int32(kv_rows),
            DecodeRows(slots, starts, rounds[0][1].count) if rounds else None,
            int32(tiles) if tiles else None,
        )


def int32(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_tokens(rows: ForwardRows, tokens: Sequence[int]) -> ForwardRows:
    return ForwardRows(int32(tokens), rows.positions, rows.kv_rows, rows.rounds, rows.tiles)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to rounding: numbers that spread wider than 1 may be as much farther apart."""
    if not expected.numel():
        return found.shape == expected.shape
    error = ERROR * max(1.0, float(expected.std()))
    return found.shape == expected.shape and bool((found - expected).abs().max() < error)


def same_rows_written(found: KvPool, expected: KvPool) -> bool:
    written = ~expected.tensor.isnan()
    return torch.equal(~found.tensor.isnan(), written) and close(
        found.tensor[written], expected.tensor[written]
    )


class Steps:
    """Two prompts at once (`first` rows of the first), then rounds of both beside another prompt."""

    def __init__(self, rig: Rig, first: int) -> None:
        a, b, c = (rig.table(rows) for rows in (first + 3, 12, first + 4))
        self._wide = first == FIRST["wide"]
        self.steps = [
            ([], [(2, QuerySpan(a, 0, first)), (0, QuerySpan(b, 0, 9))]),
            ([(0, QuerySpan(b, 9, 3)), (2, QuerySpan(a, first, 3))], [(1, QuerySpan(c, 0, first + 4))]),
        ]

    def __iter__(self) -> Iterator[tuple[Placed, Placed, list[QuerySpan], torch.Tensor]]:
        generator = torch.Generator().manual_seed(5)
        for rounds, chunks in self.steps:
            spans = [span for _, span in (*rounds, *chunks)]
            count = sum(span.count for span in spans)
            assert (count > skinny.MAX_ROWS) == self._wide
            yield rounds, chunks, spans, torch.randint(128, (count,), generator=generator)


def same_forwards(
    target: Path, first: int, config: ModelConfig | None = None, rig: Rig | None = None
) -> Decoder[Projection]:
    """The plain model's are the fused one's, whose configuration `config` is, if it is given."""
    rig = rig or Rig(target)
    config = config or rig.config
    capture = (1, 1, config.num_layers)
    tables = torch.zeros(SLOTS, 16, dtype=torch.int32)
    twin = Twin(config, rig.pool, tables)
    with FolderWeights(target, config.spelling, quantized=config.quantized, fused=config.fused) as weights:
        model = Decoder(config, weights, twin.machine)
    for rounds, chunks, spans, tokens in Steps(rig, first):
        residual, expected = rig.forward(spans, tokens.tolist(), capture)
        rows = with_tokens(twin.rows(rounds, chunks), tokens.tolist())
        x, captured = model.forward(rows, twin.pool, capture)
        assert close(captured, expected[: rows.count])
        assert torch.equal(x, captured[:, -rig.config.hidden_size :])
        assert same_rows_written(twin.pool, rig.pool)
        picked = [rows.count - 1, 0]
        assert close(model.logits(x, int32(picked)), rig.model.logits(residual, torch.tensor(picked)))
    return model
