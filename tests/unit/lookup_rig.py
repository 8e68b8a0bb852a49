"""Sequences that drafts are looked up for, and a head that proposes what the test says."""

from __future__ import annotations

import random

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence
from eyas.engine.speculation.drafters.base import Drafter, SequenceProposal


class ScriptedHead(Drafter):
    """`drafts` are taken once; `heard` says what it was asked."""

    local_kv = True

    def __init__(self) -> None:
        self.drafts: list[SequenceProposal] = []
        self.heard: list[str] = []

    def open(self, seq, base, handle) -> bool:
        self.heard.append("open")
        return True

    def post(self, commits) -> None:
        self.heard.append("post")

    def take(self) -> list[SequenceProposal]:
        drafts, self.drafts = self.drafts, []
        return drafts

    def owed(self) -> bool:
        return True

    def close(self, seq) -> None:
        self.heard.append("close")


def sequence(
    prompt: tuple[int, ...], output: list[int], predicted: tuple[int, ...] = (), slot: int = 0
) -> Sequence:
    request = GenerationRequest(str(slot), prompt, SamplingParams(), predicted=predicted)
    generation = Generation(request, 1, GenerationKind.LOCAL, 0.0, 0.0)
    return Sequence(slot, generation, 0, prompt, output, slot=slot)


def sequences(seed: int, alphabet: int, count: int) -> list[Sequence]:
    """Some that have begun, some with predictions, which are sometimes nearly right."""
    rng, found = random.Random(seed), []
    for slot in range(count):
        prompt = tuple(rng.randrange(alphabet) for _ in range(rng.randrange(1, 24)))
        output = [rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 2, rng.randrange(30)]))]
        predicted = tuple(rng.randrange(alphabet) for _ in range(rng.choice([0, 1, rng.randrange(60)])))
        if rng.random() < 0.5:
            at = rng.randrange(len(output) + 1)
            predicted = (*output[:at], *predicted[: rng.randrange(3)], *output[at:], *predicted)
        found.append(sequence(prompt, output, predicted, slot))
    return found
