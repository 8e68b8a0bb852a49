"""Whole engines that draft with EAGLE-2 and unusual EAGLE-3 heads: no token is another, however served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loopback import Loopback
from loopback_runs import assert_idle, mixed_requests, patient, run_all, undrafted

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit.device_engines import DRAFTS, PROMPT, SIZES, answers, on_device, rounds, tokens
from tests.unit.eagle_engines import CHAIN, TREE, base, config_of
from tests.unit.tiny import edit, write_tiny_eagle3, write_tiny_llama

__all__ = ["base"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED = mixed_requests(6, seed=4)


@pytest.fixture(scope="module")
def expected(base: EngineConfig) -> list[dict[int, list[int]]]:
    """What plain decoding says to `ASKED`."""
    return undrafted(base, ASKED)


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        pytest.param(TREE, False, id="unified tree", marks=pytest.mark.slow),
        pytest.param(CHAIN, True, id="split chain"),
        pytest.param(CHAIN, False, id="unified chain", marks=pytest.mark.slow),
        pytest.param(TREE, True, id="split tree", marks=pytest.mark.slow),
    ],
)
def test_a_head_changes_no_token(
    base: EngineConfig, expected: list[dict[int, list[int]]], spec: SpeculationConfig, split: bool
) -> None:
    config = replace(base, speculation=spec)
    cluster = patient(config) if split else Loopback(config)
    assert run_all(cluster, ASKED, split=split) == expected
    entries = [entry for result in cluster.results.values() for entry in result.entries]
    assert any(entry.accepted for entry in entries), "nothing was ever accepted: drafting was not exercised"
    assert_idle(cluster)
    cluster.close()


@pytest.mark.slow
def test_features_of_another_width_cross_the_wire(
    base: EngineConfig, expected: list[dict[int, list[int]]], tmp_path: Path
) -> None:
    """Of a head with ends of its own and EAGLE-3.1's recurrence, whose layers a flag names."""
    narrow = write_tiny_llama(tmp_path / "narrow", hidden=48)
    head = write_tiny_eagle3(tmp_path / "head", narrow, draft_vocab=100)
    own = {"fc.weight": torch.randn(48, 192) / 14, "embed_tokens.weight": torch.randn(256, 48)}
    edit(head, dict(own), norm_output=True, norm_before_residual=True)
    config = replace(base, speculation=CHAIN, draft=str(head), draft_capture_layers=(1, 2, 4))
    cluster = patient(config)
    assert run_all(cluster, ASKED, split=True) == expected
    assert any(entry.accepted for result in cluster.results.values() for entry in result.entries)
    assert_idle(cluster)
    cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [DRAFTS["chain"], DRAFTS["tree"]], ids=["chain", "tree"])
def test_a_device_drafts_as_the_plain_engine_does(tmp_path: Path, drafts: SpeculationConfig) -> None:
    """Tokens, and where the rounds end."""
    small = {"num_pages": 32, "chunk_tokens": 16, "max_running": 4, "context_length": 128}
    plain = replace(config_of(tmp_path, **SIZES), speculation=drafts, **small)
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=8, max_tokens=6, ignore_eos=True)
    asked = [GenerationRequest("two chunks", PROMPT[:20], params)]
    expected, _ = answers(plain, asked)
    found, _ = answers(on_device(plain), asked)
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    assert any(entry.accepted for result in found for entry in result.entries)
