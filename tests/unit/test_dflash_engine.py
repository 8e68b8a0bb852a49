"""Whole engines that draft with DFlash heads: no token is another, however served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from loopback import Loopback, split_configs
from loopback_runs import assert_idle, patient, run_all, undrafted

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, KvKind, RequestDraftLimits
from eyas.engine.loading import device_build
from eyas.engine.loading.spec import EngineSpec
from tests.unit.depth_runs import answers, requests
from tests.unit.device_engines import PROMPT, SIZES, on_device, rounds, tokens
from tests.unit.device_engines import answers as answers_of
from tests.unit.dflash_engines import ASKED, CHAIN, config_of
from tests.unit.tiny import write_tiny_eagle
from tests.unit.wandering import wander

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return config_of(tmp_path_factory.mktemp("models"), (1, 2, 4), layers=4)


@pytest.mark.parametrize("split", [False, True], ids=["unified", "split"])
def test_a_block_changes_no_token(base: EngineConfig, split: bool) -> None:
    """Greedy and seeded, with other limits per request; in one engine, and by the draft service."""
    cluster = patient(base) if split else Loopback(base)
    assert run_all(cluster, ASKED, split=split) == undrafted(base, ASKED)
    entries = [entry for result in cluster.results.values() for entry in result.entries]
    assert any(entry.accepted for entry in entries), "nothing was ever accepted: drafting was not exercised"
    assert_idle(cluster)
    cluster.close()


@pytest.mark.slow
def test_a_device_drafts_as_the_plain_engine_does(tmp_path: Path) -> None:
    """Tokens, and where the rounds end."""
    small = {"num_pages": 32, "chunk_tokens": 16, "max_running": 4, "context_length": 128}
    plain = replace(config_of(tmp_path, (0, 1, 2), **SIZES), **small)
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=8, max_tokens=6, ignore_eos=True)
    asked = [GenerationRequest("two chunks", PROMPT[:20], params)]
    expected, _ = answers_of(plain, asked)
    found, _ = answers_of(on_device(plain), asked)
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    assert any(entry.accepted for result in found for entry in result.entries)


@pytest.mark.slow
def test_a_device_changes_no_token_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of every depth follow each other, plain ones too, whose rows wait for the head."""
    small = {"num_pages": 32, "chunk_tokens": 16, "max_running": 4, "context_length": 128}
    plain = replace(config_of(tmp_path, (0, 1, 2), **SIZES), **small)
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=8, max_tokens=14, ignore_eos=True)
    asked = [GenerationRequest("two chunks", PROMPT[:20], params)]
    expected, _ = answers_of(plain, asked)
    wander(monkeypatch)
    found, _ = answers_of(on_device(replace(plain, speculation=replace(CHAIN, adaptive=True))), asked)
    assert tokens(found) == tokens(expected)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (SpeculationConfig(8, 1, 9), "--spec-steps 8: draft head .* drafts up to 7 tokens at once"),
        (SpeculationConfig(3, 2, 6), "--spec-topk 2: draft head .* drafts chains"),
    ],
)
def test_what_one_pass_cannot_draft_is_refused(
    base: EngineConfig, spec: SpeculationConfig, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        Loopback(replace(base, speculation=spec))


def test_a_round_is_as_deep_as_its_block_where_no_option_says(base: EngineConfig) -> None:
    """Seven drafts where depths adapt, else as many as of any head; what an option says stays."""
    for steps, adaptive, open_depth, expected in (
        (5, True, True, 7),
        (5, False, True, 5),
        (9, False, True, 7),
        (5, True, False, 5),
    ):
        spec = SpeculationConfig(steps, 1, steps + 1, adaptive=adaptive, open_depth=open_depth)
        found = EngineSpec.of(replace(base, speculation=spec)).config.speculation
        assert (found.steps, found.draft_tokens) == (expected, expected + 1)


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whatever_the_depth_the_tokens_are_plain_decodings(
    base: EngineConfig, monkeypatch: pytest.MonkeyPatch, split: bool
) -> None:
    """Depth changes all the time; penalties, log probabilities, several choices, and one without drafts."""
    asked, plain = requests(), replace(base, draft=None)
    policies = wander(monkeypatch)
    config = replace(base, speculation=replace(CHAIN, adaptive=True))
    found = answers(*(split_configs(config) if split else (config,)), wanted=asked)
    assert [result.tokens for result in found] == [r.tokens for r in answers(plain, wanted=asked)]
    (policy,) = [policy for policy in policies if policy.chosen]
    assert set(policy.chosen) == set(policy.depths)
    offered = {entry.offered for result in found for entry in result.entries}
    assert offered >= {0, 1, 3, 5} or split
    assert not any(entry.offered for entry in found[-1].entries)


def test_a_request_says_how_far_its_own_drafts_reach(base: EngineConfig) -> None:
    limits = [RequestDraftLimits(), RequestDraftLimits(steps=1), RequestDraftLimits(draft_tokens=3)]
    asked = [msgspec.structs.replace(r, draft_limits=limits[i % 3]) for i, r in enumerate(requests()[:3])]
    found = answers(base, wanted=asked)
    assert [result.tokens for result in found] == [
        r.tokens for r in answers(replace(base, draft=None), wanted=asked)
    ]
    assert [max(entry.offered for entry in result.entries) for result in found] == [5, 1, 2]


def test_room_is_left_for_the_logits_of_all_drafts(base: EngineConfig) -> None:
    blocks, chains = (
        EngineSpec.of(on_device(replace(base, max_running=4, draft=draft)))
        for draft in (base.draft, str(write_tiny_eagle(Path(base.pool_dir) / "chain", Path(base.model))))
    )
    groups = [KvKind.TARGET, KvKind.DRAFT]
    more = device_build._demand(blocks, groups).reserve - device_build._demand(chains, groups).reserve
    pages = [spec.with_pages(1).shape(KvKind.DRAFT).page_bytes for spec in (blocks, chains)]
    assert more == 4 * 256 * 4 * CHAIN.steps + pages[0] - pages[1]
