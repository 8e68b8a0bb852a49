"""A draft head of the device path beside the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.heads import head_family
from tests.unit.fused_models import SLOTS, Steps, Twin, close, same_rows_written, with_tokens
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import write_tiny_llama

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96, "vocab": 128}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target", tied=False, **SIZES)


def same_drafts(target: Path, folder: Path, first: int) -> bool:
    """Whether the device's head does what the plain one does with the same captured rows."""
    rig = Rig(target)
    plain = HeadRig(folder, rig)
    plain.pool.tensor.fill_(float("nan"))
    twin = Twin(rig.config, rig.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    with FolderWeights(target) as weights:
        model = Decoder(rig.config, weights, twin.machine)
    twin = Twin(plain.config.decoder, plain.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    algorithm = plain.config.algorithm
    kind = head_family(algorithm)
    with FolderWeights(folder, kind.spelling) as weights:
        tap = kind.load_tap(plain.config, weights, model.final_norm, twin.machine)
        head = kind.load_draft(plain.config, weights, model.ends, twin.machine)
    assert tap.layers == plain.capture.layers
    same = []
    for rounds, chunks, spans, tokens in Steps(rig, first):
        captured = torch.randn(len(tokens), len(tap.layers) * rig.config.hidden_size)
        features = plain.capture.features(captured, tokens)
        same.append(close(tap.features(captured, tokens), features))
        expected = plain.forward(features, spans, tokens.tolist())
        rows = with_tokens(twin.rows(rounds, chunks), tokens.tolist())
        given = features.clone()
        head.keep(given, rows.tokens, rows, twin.pool)
        kept = twin.pool.tensor.view(torch.int32).clone()
        found, below = head.forward(given, rows.tokens, rows, twin.pool)
        assert below is found and torch.equal(given, features)
        same += [close(found, expected), same_rows_written(twin.pool, plain.pool)]
        same.append(torch.equal(kept, twin.pool.tensor.view(torch.int32)))
        same.append(close(head.logits(found[:5]), plain.head.logits(expected[:5])))
    return all(same)
