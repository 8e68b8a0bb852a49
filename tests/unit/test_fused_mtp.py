"""The fused MTP head against the plain one, and MiMo's target: hidden rows, features, KV, logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.kernels.drafts.head_input import join
from eyas.engine.models import mtp
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.mtp_names import MIMO, NEXTN, Dialect, dialect_of
from eyas.engine.models.ops import device_machine
from eyas.engine.models.ops.device_machine import DeviceMachine
from tests.unit.fused_models import (
    FIRST,
    SLOTS,
    Steps,
    Twin,
    close,
    int32,
    same_forwards,
    same_rows_written,
    with_tokens,
)
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny_mtp import write_tiny_mimo, write_tiny_nextn

pytestmark = pytest.mark.slow

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96, "vocab": 128}
FORMS = {
    "mimo": write_tiny_mimo,
    "nextn": write_tiny_nextn,
    "three of mimo": partial(write_tiny_mimo, stages=3),
    "three": partial(write_tiny_nextn, stages=3),
}


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FORMS[request.param](tmp_path_factory.mktemp("models") / request.param, **SIZES)


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_mimo_is_mimo(tmp_path: Path, first: int) -> None:
    same_forwards(write_tiny_mimo(tmp_path, **SIZES), first)


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_a_head_is_a_head(folder: Path, first: int) -> None:
    assert same_drafts(folder, first)


@pytest.mark.parametrize("folder", ["mimo", "nextn"], indirect=True)
@pytest.mark.parametrize("change", ["feature_first", "first_is_blank"])
def test_the_comparison_notices_the_other_dialects_order(folder: Path, change: str) -> None:
    """Power check."""

    def other(prefix: str) -> Dialect:
        dialect = MIMO if prefix.startswith(MIMO.stem) else NEXTN
        return replace(dialect, **{change: not getattr(dialect, change)})

    assert not same_drafts(folder, FIRST["narrow"], other)


@pytest.mark.parametrize("folder", ["three"], indirect=True)
@pytest.mark.parametrize("wrong", ["unseen", "before", "keep"])
def test_the_comparison_notices_wrong_stages(
    folder: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power check: rows that are none, seen; each row fed with its own state; none left to the next step."""
    if wrong == "unseen":
        monkeypatch.setattr(DeviceMachine, "bounded", lambda self, rows, unseen: rows)
    elif wrong == "before":
        monkeypatch.setattr(device_machine.newest, "before", lambda gave, *rest: gave)
    else:
        monkeypatch.setattr(device_machine.newest, "keep", lambda *all: None)
    assert not same_drafts(folder, FIRST["narrow"])


def same_drafts(folder: Path, first: int, dialect: Callable[[str], Dialect] = dialect_of) -> bool:
    """Whether the fused head's rows, KV and logits are the plain one's, of the same features.

    `dialect`: by which the fused one reads its tensors.
    """
    rig = Rig(folder)
    plain = HeadRig(folder, rig)
    plain.pool.tensor.fill_(float("nan"))
    twin = Twin(plain.config.decoder, plain.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    with FolderWeights(folder) as weights, patch.object(mtp, "dialect_of", dialect):
        model = Decoder(rig.config, weights, twin.machine)
        tap = mtp.load_tap(plain.config, weights, model.final_norm, twin.machine)
        head = mtp.load_draft(plain.config, weights, model.ends, twin.machine)
    assert tap.layers == plain.capture.layers == (SIZES["layers"],)
    same = []
    for rounds, chunks, spans, tokens in Steps(rig, first):
        tapped = torch.randn(len(tokens), rig.config.hidden_size)
        features = tap.features(tapped, tokens)
        assert close(features, plain.capture.features(tapped, tokens))
        expected, under = plain.drafted(features, spans, tokens.tolist())
        rows = with_tokens(twin.rows(rounds, chunks), tokens.tolist())
        if plain.config.stages == 1:
            head.keep(features, rows.tokens, rows, twin.pool)
        kept = twin.pool.tensor.view(torch.int32).clone()
        found, below = head.forward(features, rows.tokens, rows, twin.pool)
        same.append(plain.config.stages > 1 or torch.equal(kept, twin.pool.tensor.view(torch.int32)))
        assert (below is found) == (plain.config.stages == 1)
        assert head.token_map is plain.head.token_map is None
        same += [close(found, expected), close(below, under), same_rows_written(twin.pool, plain.pool)]
        same.append(close(head.logits(found[:5]), plain.head.logits(expected[:5])))
        # Below the newest row of each sequence, deeper than there are layers.
        slots, ends = [slot for slot, _ in (*rounds, *chunks)], list(accumulate(s.count for s in spans))
        under, below = (gave[[end - 1 for end in ends]] for gave in (under, below))
        for depth in range(1, 5):
            following = [replace(s, start=s.start + s.count + depth - 1, count=1) for s in spans]
            expected, under = plain.drafted(under, following, [depth] * len(spans), depth)
            rows = twin.rows(list(zip(slots, following, strict=True)), [])
            rows = replace(with_tokens(rows, [depth] * len(spans)), depth=depth)
            found, below = head.forward(below, rows.tokens, rows, twin.pool)
            same.append(close(found, expected))
    return all(same)


def test_a_blank_embedding_is_one_at_position_0() -> None:
    embedding, features, tokens = torch.randn(8, 32), torch.randn(3, 32), int32([4, 5, 5])
    usual = join(tokens, embedding, features, 1e-5, False)
    found = join(tokens, embedding, features, 1e-5, False, int32([7, 0, 1]))
    assert torch.equal(found[[0, 2]], usual[[0, 2]])
    assert not found[1, :32].any() and torch.equal(found[1, 32:], usual[1, 32:])
