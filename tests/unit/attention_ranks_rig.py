"""Engines of several attention ranks on tiny models, and what each rank had to do in every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.loading import build
from eyas.engine.loop.forwards import DataParallelForward
from eyas.engine.parallel.step_calls import StepRows
from tests.unit import tiny_deepseek
from tests.unit.loopback import Loopback, Result, wait_all

BASE = EngineConfig(
    draft=None, num_pages=64, max_running=8, chunk_tokens=32, context_length=256, transfer="none", worker="w"
)

SIZES = tiny_deepseek.SMALL | {"num_hidden_layers": 2, "vocab_size": 64}


@dataclass
class Seen:
    """A `Forward` that notes how many rows each rank has in every step."""

    forward: DataParallelForward
    ranks: int
    pages: int
    steps: list[list[int]] = field(default_factory=list)

    def __call__(self, rows: StepRows):
        self.steps.append([len(share.tokens) for share in rows.shares(self.ranks, self.pages)])
        return self.forward(rows)

    def close(self) -> bool:
        return self.forward.close()


@dataclass
class Ranked:
    """A running engine of several ranks. `seen`: its steps."""

    cluster: Loopback
    seen: Seen

    def run(self, requests: list[GenerationRequest], seconds: float = 60.0) -> list[Result]:
        results = [self.cluster.submit(request, split=False) for request in requests]
        wait_all(results, seconds)
        return results

    def idle(self, first: int = 0) -> tuple[int, int]:
        """Steps from `first` on with an idle rank: those with prompt rows, and those of rounds alone."""
        idle = [step for step in self.seen.steps[first:] if 0 in step]
        prompts = sum(max(step) > 8 for step in idle)
        return prompts, len(idle) - prompts


def ranked(monkeypatch: pytest.MonkeyPatch, config: EngineConfig, ranks: int) -> Ranked:
    """Starts it; the caller closes its cluster."""
    kept: list[Seen] = []
    start = build.attention_ranks

    def noted(loaded, pool, beat):
        model, forward, leader = start(loaded, pool, beat)
        kept.append(Seen(forward, ranks, loaded.config.num_pages))
        return model, kept[-1], leader

    with monkeypatch.context() as patched:
        patched.setattr(build, "attention_ranks", noted)
        cluster = Loopback(replace(config, dp_attention=ranks))
    return Ranked(cluster, kept[-1])


def answers(results: list[Result]) -> list[object]:
    """Tokens and log-probabilities, to the bit."""
    found = []
    for result in results:
        entries = sorted(result.entries, key=lambda entry: (entry.choice, entry.index))
        prompts = [list(entry.prompt.rows()) for entry in entries if entry.prompt is not None]
        found.append((result.tokens, [entry.logprobs for entry in entries if entry.logprobs], prompts))
    return found


def alone(config: EngineConfig, requests: list[GenerationRequest]) -> list[Result]:
    """What one rank gives."""
    cluster = Loopback(config)
    try:
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, 90)
    finally:
        cluster.close()
    return results


def mixed(count: int, seed: int, vocab: int = 64) -> list[GenerationRequest]:
    """Lengths, choices, temperatures, scores of prompts: some of everything."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        params = [
            SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2),
            SamplingParams(temperature=1.0, seed=rng.getrandbits(60), max_tokens=14, logprobs=2),
            SamplingParams(temperature=0.8, seed=rng.getrandbits(60), max_tokens=5, repetition_penalty=1.2),
        ][i % 3]
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.choice([1, 2, 15, 17, 33, 70])))
        choices = tuple(RequestChoice(c) for c in range(1 + i % 4 // 3 * 2))
        made.append(GenerationRequest(f"r{i}", prompt, params, choices))
    return made


def request(name: str, rows: int, tokens: int, seed: int = 0) -> GenerationRequest:
    """A greedy one of `rows` prompt tokens."""
    rng = random.Random(f"{name} {seed}")
    prompt = tuple(rng.randrange(64) for _ in range(rows))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, prompt, params)


def model_of(folder: Path) -> dict[str, str]:
    """The fields of a configuration that name it."""
    return {"model": str(folder)}
