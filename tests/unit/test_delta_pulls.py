"""Chats of several turns through split services: decode pulls what is new to it, and nothing twice."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import Loopback, Result, split_configs, wait_all
from tiny import write_tiny_pair

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import EngineTimings, GenerationRequest, Role
from kv_transfer.layout import pages_for

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 16
PAGE_BYTES = 4 * 2 * PAGE * 2 * 16 * 4  # layers, K and V, rows, heads, dims, float32
CHAIN, TREE = SpeculationConfig(), SpeculationConfig(4, 3, 12)
CHATS, TURNS, ANSWER = 2, 4, 12


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_tiny_pair(tmp_path)
    (tmp_path / "pools").mkdir()
    return EngineConfig(
        model=str(tmp_path / "target"),
        draft=str(tmp_path / "head"),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(tmp_path / "pools"),
    )


def timings(result: Result) -> EngineTimings:
    return next(entry.timings for entry in result.entries if entry.timings)


@pytest.mark.slow
def test_chats_of_several_turns_move_only_new_pages(
    config: EngineConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    cluster, plain = Loopback(*split_configs(config)), Loopback(replace(config, draft=None, worker="plain"))
    said: list[tuple[int, ...]] = [()] * CHATS  # what each chat holds so far
    needed = moved = accepted = 0
    for turn in range(TURNS):
        prompts = [(*past, *(rng.randrange(256) for _ in range(rng.randrange(5, 45)))) for past in said]
        params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=ANSWER) for i in range(CHATS)]
        requests = [GenerationRequest(f"{turn}.{i}", p, params[i]) for i, p in enumerate(prompts)]
        results = [cluster.submit(request, split=True) for request in requests]
        expected = [plain.submit(request, split=False) for request in requests]
        wait_all([*results, *expected], 30)
        assert [result.tokens for result in results] == [result.tokens for result in expected]
        for past, prompt, result in zip(said, prompts, results, strict=True):
            held = max(0, len(past) - 1) // PAGE  # of the last token that was said no KV was ever needed
            pages = pages_for(len(prompt), PAGE)
            assert timings(result).transfer_bytes == (pages - held) * PAGE_BYTES
            assert timings(result).cached_tokens == held * PAGE
            needed, moved = needed + pages, moved + pages - held
            accepted += sum(entry.accepted for entry in result.entries)
        said = [(*prompt, *result.tokens[0]) for prompt, result in zip(prompts, results, strict=True)]
    cluster.close()
    plain.close()
    assert accepted > 0, "nothing was drafted: speculation was not exercised"
    assert moved < needed / 2
    with capsys.disabled():
        print(f"\n{CHATS} chats of {TURNS} turns: {1 - moved / needed:.0%} of {needed} pages were not moved")


@pytest.mark.parametrize(
    ("spec", "pages"),
    [
        pytest.param(CHAIN, 12, id="chain-12"),
        pytest.param(TREE, 256, id="tree-256", marks=pytest.mark.slow),
        pytest.param(CHAIN, 256, id="chain-256", marks=pytest.mark.slow),
        pytest.param(TREE, 12, id="tree-12", marks=pytest.mark.slow),
    ],
)
def test_drafts_of_a_pulled_prompt_have_pages_wherever_it_ends(
    config: EngineConfig, spec: SpeculationConfig, pages: int
) -> None:
    """The worker that pulls also drafts: before the first round, if there is room."""
    config = replace(config, speculation=spec, num_pages=pages)
    prefill, decode, _ = split_configs(config)
    cluster = Loopback(prefill, replace(decode, roles=(Role.DECODE, Role.DRAFT)))
    plain = Loopback(replace(config, draft=None, worker="plain"))
    requests = [
        GenerationRequest(f"r{length}", tuple(range(length)), SamplingParams(temperature=0.0, max_tokens=8))
        for length in range(2 * PAGE - 7, 2 * PAGE + 1)
    ]
    results = [cluster.submit(request, split=True) for request in requests]
    expected = [plain.submit(request, split=False) for request in requests]
    wait_all([*results, *expected], 30)
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    firsts = [next(entry for entry in result.entries if entry.index == 1) for result in results]
    assert pages == 12 or all(entry.offered for entry in firsts), "a first round has no drafts"
    cluster.close()
    plain.close()
