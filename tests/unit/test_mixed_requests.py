"""Requests of every kind at once: each gets, to the bit, what it gets alone from an engine with room for all.

Several choices, scored prompts, answers of no tokens, bad words, log-probabilities, callers and calls share
engines that are short of pages and of slots: requests give way, wait, fork late and are computed again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import Loopback, Result, split_configs, wait_all
from tiny import write_tiny_pair

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST = 60  # tokens of a prompt
COUNT = 12
VOCAB = 256


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder)
    return EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=400,
        context_length=160,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


def some_requests(seed: int) -> list[GenerationRequest]:
    pick = random.Random(seed)
    stem = tuple(pick.choices(range(VOCAB), k=LONGEST // 2))  # of prompts that are alike
    return [_request(f"r{number}", pick, stem) for number in range(COUNT)]


def _request(name: str, pick: random.Random, stem: tuple[int, ...]) -> GenerationRequest:
    start = pick.choice(((), stem[:16], stem))
    prompt = (*start, *pick.choices(range(VOCAB), k=pick.randint(1, LONGEST - len(start))))
    asks = pick.random() < 0.4
    first = pick.choice((0, 0, len(prompt) // 2))
    params = SamplingParams(
        max_tokens=pick.choice((0, 1, 5, 20)) if asks else pick.randint(1, 20),
        temperature=pick.choice((0.0, 1.0)),
        seed=pick.getrandbits(64),
        ignore_eos=pick.random() < 0.8,
        frequency_penalty=pick.choice((0.0, 0.0, 0.5)),
        logprobs=pick.choice((None, None, 2)),
        prompt_logprobs=pick.choice((0, 3)) if asks else None,
        prompt_logprobs_start=first if asks else 0,
        bad_words=((7,), *((i, pick.randrange(VOCAB)) for i in range(100))) if pick.random() < 0.2 else (),
    )
    choices = tuple(map(RequestChoice, range(pick.choice((1, 1, 1, 2, 4)))))
    call = {"caller": pick.choice("ab"), "call": pick.choice("xxxy")}
    return GenerationRequest(name, prompt, params, choices, speculative=pick.random() < 0.7, **call)


def told(result: Result) -> tuple[object, ...]:
    """All that a client is told, which is each thing once."""
    prompts = [entry.prompt for entry in result.entries if entry.prompt is not None]
    assert len(prompts) <= 1 and (not prompts or result.entries[0].prompt is prompts[0])
    logprobs = {
        choice: [one for e in result.entries if e.choice == choice for one in e.logprobs]
        for choice in result.finishes
    }
    return result.tokens, result.finishes, logprobs, prompts


def run(cluster: Loopback, requests: Sequence[GenerationRequest], *, split: bool = False) -> list[Result]:
    results = [cluster.submit(request, split=split) for request in requests]
    wait_all(results, 120)
    return results


SHORT_OF = {"pages": {"num_pages": 16}, "slots": {"max_running": 4, "num_pages": 200}}


ALL = list(itertools.product(SHORT_OF, [False, True]))
QUICK = [("slots", False)]


@pytest.mark.parametrize(
    ("short", "split"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL],
)
def test_beside_others_as_alone(roomy: EngineConfig, short: str, split: bool) -> None:
    requests = some_requests(seed=len(short) + split)
    plain = Loopback(replace(roomy, draft=None))
    alone = [told(run(plain, [request])[0]) for request in requests]
    plain.close()

    config = replace(roomy, chunk_tokens=24, max_waiting=COUNT, **SHORT_OF[short])
    cluster = Loopback(*(split_configs(config) if split else (config,)))
    mixed_prefill_budget = [told(result) for result in run(cluster, requests, split=split)]
    scheduler = cluster.by_role["decode"].engine._scheduler
    cluster.close()
    assert scheduler.preemptions > 0, "there was room for all"
    assert mixed_prefill_budget == alone
