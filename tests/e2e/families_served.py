"""Every family through `eyas serve`: tokens that differ, of those that a client of the OpenAI API gets.

    python -m tests.e2e.families_served [FAMILY ...]

prints the table and gives 1 if an answer differs. Small random models of float32 with the embedded model's
tokenizer; prompts are cut into chunks and found in the cache again. A greedy token is right if transformers,
of the text so far, gives no other one a logit that is higher by more than `SLACK` of the largest.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI

from eyas.common.config import NANO
from eyas.engine.models.table import read_model
from tests.e2e.served import Folders, serving
from tests.unit.families import SAMPLES, write_family

SLACK = 5e-5
VOCAB = 4096  # of the embedded model's tokenizer
NEW = 24
LENGTHS = (3, 41, 150)  # windows of 40 are crossed; the last prompt is cut into chunks
FLAGS = ("--num-pages=256", "--chunked-prefill-size=48", "--max-running-requests=12")
TOKENS_OF_THEIR_OWN = {"gemma4_tokens": {"vocab_size_per_layer_input": VOCAB}}
FEW = {str(token): 60 for token in (300, 301, 302)}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 1},
    "seeded": {"temperature": 1, "seed": 5},
    "of few tokens": {"temperature": 1, "seed": 7, "logit_bias": FEW},  # so that what is looked up is right
}


@dataclass(frozen=True)
class Answer:
    """A choice's tokens, their log-probabilities if it was asked for them, and the drafts that were right."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class Way:
    """How requests are put to a server: one after the other or all at once, as streams or not."""

    together: bool
    drafts: bool

    def ask(self, url: str, requests: Iterable[dict[str, Any]]) -> list[Answer]:
        """The answers, in order."""
        requests = list(requests)
        with (
            OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client,
            ThreadPoolExecutor(len(requests) if self.together else 1) as callers,
        ):
            name = client.models.list().data[0].id
            return list(callers.map(lambda request: self._answer(client, name, request), requests))

    def _answer(self, client: OpenAI, name: str, request: dict[str, Any]) -> Answer:
        ours = {"ignore_eos": True, "return_token_ids": True, "speculative": self.drafts}
        options = {"include_usage": True} if self.together else None
        said = client.completions.create(
            model=name,
            **request,
            max_tokens=NEW,
            extra_body=ours,
            **({"stream": True, "stream_options": options} if self.together else {}),
        )
        events = list(said) if self.together else [said]
        choices = [choice for event in events for choice in event.choices]
        details = next(event.usage for event in reversed(events) if event.usage).completion_tokens_details
        return Answer(
            tuple(token for choice in choices for token in getattr(choice, "token_ids", None) or ()),
            tuple(p for choice in choices if choice.logprobs for p in choice.logprobs.token_logprobs or ()),
            (details.accepted_prediction_tokens or 0) if details else 0,
        )


WAYS = {
    "unified": {
        "alone": Way(
            together=False, drafts=False
        ),  # its long prompts are read in chunks, the others' are cached
        "together": Way(together=True, drafts=False),
        "drafts, alone": Way(together=False, drafts=True),
        "drafts, together": Way(together=True, drafts=True),
    },
    "split": {
        "together": Way(together=True, drafts=False),  # chunks beside one another
        "alone": Way(together=False, drafts=False),
        "drafts, together": Way(together=True, drafts=True),
    },
}
COLUMNS = [f"{layout}, {way}" for layout, ways in WAYS.items() for way in ways][1:]


@dataclass(frozen=True)
class ServedFamily:
    """What a family's servers answered. `differ`: answers that are not transformers', then those that are
    not as the first way's, by way. `error`: of log-probabilities, as a share of the largest logit.
    `accepted`: drafts that were right, of all ways.
    """

    family: str
    asked: int
    differ: dict[str, int]
    error: float
    accepted: int

    @classmethod
    def of(cls, family: str, folder: Path, **served: Any) -> ServedFamily:
        """Serves a small random model of it from a folder. `served`: another configuration than its own."""
        sizes = {"vocab_size": VOCAB, **TOKENS_OF_THEIR_OWN.get(family, {})}
        model = write_family(folder / family, family, **sizes)
        if served:
            write_family(folder / family, family, **sizes, **served)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(NANO / name, folder / family)
        answers = _answers(folder / family)
        first = next(iter(answers.values()))
        context = read_model(folder / family).context_length
        judged = [
            _judged(model, context, prompt, answer) for prompt, answer in zip(_prompts(), first, strict=False)
        ]
        differ = {"transformers": sum(not right for right, _ in judged)}
        for way in COLUMNS:
            pairs = zip(answers[way], first, strict=True)
            differ[way] = sum(answer.tokens != expected.tokens for answer, expected in pairs)
        accepted = sum(answer.accepted for each in answers.values() for answer in each)
        return cls(family, len(first), differ, max(error for _, error in judged), accepted)

    @property
    def problems(self) -> int:
        """Answers that differ, and one for an error above `SLACK`, and for drafts that were never right."""
        return sum(self.differ.values()) + (self.error > SLACK) + (not self.accepted)

    def row(self) -> str:
        """Of the table."""
        numbers = " | ".join(map(str, self.differ.values()))
        return f"| {self.family} | {self.asked} | {numbers} | {self.error:.1e} | {self.accepted} |"


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def _answers(model: Path) -> dict[str, list[Answer]]:
    """By layout and way; of every kind's prompts, greedy ones first."""
    requests = [{"prompt": prompt, **kind} for kind in KINDS.values() for prompt in _prompts()]
    answers = {}
    for layout, ways in WAYS.items():
        with serving(Folders(str(model), "ngram"), f"--layout={layout}", *FLAGS) as served:
            for name, way in ways.items():
                answers[f"{layout}, {name}"] = way.ask(served.url, requests)
    return answers


def _judged(model: Any, context: int, prompt: list[int], answer: Answer) -> tuple[bool, float]:
    """Whether a greedy answer is transformers', and its log-probabilities' error.

    Angles that follow the length of the context do so there by that of the text at hand, so it is filled up.
    """
    ids = [*prompt, *answer.tokens]
    with torch.no_grad():
        logits = model(torch.tensor([ids + [3] * (context - len(ids))])).logits[0]
    logits = logits[len(prompt) - 1 : len(ids) - 1].double()
    tokens, largest = torch.tensor(answer.tokens)[:, None], logits.abs().max()
    behind = logits.amax(-1) - logits.gather(1, tokens)[:, 0]
    wanted = logits.log_softmax(-1).gather(1, tokens)[:, 0]
    error = (torch.tensor(answer.logprobs, dtype=torch.float64) - wanted).abs().max() / largest
    return len(answer.tokens) == NEW and bool(behind.max() <= SLACK * largest), float(error)


def main(families: list[str]) -> int:
    """Prints the table of these families, or of all; 1 if an answer differs."""
    torch.set_num_threads(1)
    start, wrong = time.monotonic(), 0
    columns = ("Family", "answers", "transformers", *COLUMNS, "error", "drafts that were right")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for family in families or SAMPLES:
        try:
            with tempfile.TemporaryDirectory() as folder:
                served = ServedFamily.of(family, Path(folder))
        except Exception as failure:  # the others' rows are worth more than this one's traceback
            wrong += 1
            print(f"| {family} | failed: {failure!r} |", flush=True)
        else:
            wrong += served.problems
            print(served.row(), flush=True)
    print(f"\n{wrong} differ; {time.monotonic() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
