"""Every family by every way through engines: tokens that differ, of transformers' and of each other.

    python -m tests.unit.family_ways [FAMILY ...]

prints the table. Greedy and seeded answers, prompts in chunks and together; then one by one, with pages that
are found again; split between an engine of prompts and one of answers; and with drafts that are looked up.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.models.table import read_model
from tests.unit.families import SAMPLES, VOCAB, write_family
from tests.unit.loopback import Loopback, split_configs, wait_all

NEW = 8
LENGTHS = (3, 41, 150)  # a window of 40 is crossed; the last one is cut into chunks
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=NEW)
Answers = list[list[int]]


@dataclass(frozen=True)
class FamilyWays:
    """A family's answers that differ, by way, of as many as `asked`. Where angles follow the length of the
    context, transformers' are no measure.
    """

    family: str
    asked: int
    differ: dict[str, int]

    @classmethod
    def of(cls, family: str, folder: Path) -> FamilyWays:
        """Serves a small random model of it from a folder."""
        model, prompts = write_family(folder / "model", family), _prompts()
        greedy = [_greedy(model, prompt) for prompt in prompts]
        requests = [
            GenerationRequest(f"{kind} {i}", prompt, params)
            for kind, params in (("greedy", GREEDY), ("seeded", SEEDED))
            for i, prompt in enumerate(prompts)
        ]
        plain = _config(folder)
        ngram = SpeculationConfig(steps=3, draft_tokens=4, ngram=True)
        expected = _together(requests, plain)
        ways = {
            "one by one": _one_by_one(requests, plain),
            "split": _together(requests, *split_configs(plain)[:2]),
            "drafts": _together(requests, replace(plain, speculation=ngram)),
        }
        ropes = {layer.attention.rope for layer in read_model(folder / "model").layers}
        if any(rope.follows_length for rope in ropes):  # there by the length of the sequence at hand
            greedy = expected[: len(greedy)]
        differ = {"transformers": _differing(expected[: len(greedy)], greedy)}
        differ |= {way: _differing(found, expected) for way, found in ways.items()}
        return cls(family, len(requests), differ)


def _prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in LENGTHS]


def _greedy(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _config(folder: Path) -> EngineConfig:
    sizes = {"num_pages": 128, "chunk_tokens": 48}
    return EngineConfig(
        model=str(folder / "model"), draft=None, pool_dir=str(folder), worker="unified", **sizes
    )


def _together(requests: list[GenerationRequest], *configs: EngineConfig) -> Answers:
    cluster = Loopback(*configs)
    try:
        results = [cluster.submit(request, split=len(configs) > 1) for request in requests]
        wait_all(results, 60)
        return [result.tokens[0] for result in results]
    finally:
        cluster.close()


def _one_by_one(requests: list[GenerationRequest], config: EngineConfig) -> Answers:
    cluster, answers = Loopback(config), []
    try:
        for request in requests:
            result = cluster.submit(request, split=False)
            wait_all([result], 60)
            answers.append(result.tokens[0])
        return answers
    finally:
        cluster.close()


def _differing(found: Answers, expected: Answers) -> int:
    return sum(one != other for one, other in zip(found, expected, strict=True))


def main(families: list[str]) -> int:
    """Prints the table of these families, or of all; 1 if an answer differs."""
    torch.set_num_threads(1)
    start, wrong = time.monotonic(), 0
    print("| Family | answers | transformers | one by one | split | drafts |\n|---|---|---|---|---|---|")
    for family in families or SAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            ways = FamilyWays.of(family, Path(folder))
        wrong += sum(ways.differ.values())
        print(f"| {family} | {ways.asked} | {' | '.join(map(str, ways.differ.values()))} |", flush=True)
    print(f"\n{wrong} answers differ; {time.monotonic() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
