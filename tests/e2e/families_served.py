"""Every family through whole servers: tokens that differ, of those that a client of the OpenAI API gets.

    python -m tests.e2e.families_served [--processes] [FAMILY ...]

prints the table and gives 1 if an answer differs. Gateway and workers are in this process, joined by gRPC, or
`eyas serve` starts each as its own, which takes some four times as long. Small random models of float32 with
the embedded model's tokenizer; prompts are cut into chunks and found in the cache again. A greedy token is
right if transformers, of the text so far, gives no other one a logit that is higher by more than `SLACK` of
the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI

from eyas.common.config import NANO, EngineConfig, SpeculationConfig
from eyas.common.types import Role
from eyas.engine.models.table import read_model
from tests.e2e.served import Folders, serving
from tests.rpc.real_cluster import real_cluster
from tests.unit.families import SAMPLES, write_family
from tests.unit.hybrid_rig import HYBRIDS, write_hybrid

SLACK = 5e-5
VOCAB = 4096  # of the embedded model's tokenizer
NEW = 24
LENGTHS = (3, 41, 150)  # windows of 40 are crossed; the last prompt is cut into chunks
PAGES, CHUNK = 256, 48
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

    async def ask(self, client: AsyncOpenAI, requests: list[dict[str, Any]]) -> list[Answer]:
        """The answers, in order."""
        name = (await client.models.list()).data[0].id
        places = asyncio.Semaphore(len(requests) if self.together else 1)

        async def answer(request: dict[str, Any]) -> Answer:
            async with places:
                return await self._answer(client, {"model": name, **request})

        return await asyncio.gather(*map(answer, requests))

    async def _answer(self, client: AsyncOpenAI, request: dict[str, Any]) -> Answer:
        ours = {"ignore_eos": True, "return_token_ids": True, "speculative": self.drafts}
        streams = {"stream": True, "stream_options": {"include_usage": True}} if self.together else {}
        said = await client.completions.create(**request, max_tokens=NEW, extra_body=ours, **streams)
        events = [event async for event in said] if self.together else [said]
        choices = [choice for event in events for choice in event.choices]
        usage = next(event.usage for event in reversed(events) if event.usage)
        details = usage.completion_tokens_details
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
    def of(cls, family: str, folder: Path, *, processes: bool = False, **served: Any) -> ServedFamily:
        """Serves a small random model of it from a folder, by `eyas serve` if `processes`. `served`: another
        configuration than its own.
        """
        sizes = {"vocab_size": VOCAB, **TOKENS_OF_THEIR_OWN.get(family, {})}
        write = write_hybrid if family in HYBRIDS else write_family
        model = write(folder / family, family, **sizes)
        if served:
            write(folder / family, family, **sizes, **served)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(NANO / name, folder / family)
        answers = asyncio.run(_answers(folder / family, processes))
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


async def _answers(model: Path, processes: bool) -> dict[str, list[Answer]]:
    """By layout and way; of every kind's prompts, greedy ones first."""
    requests = [{"prompt": prompt, **kind} for kind in KINDS.values() for prompt in _prompts()]
    start, answers = _by_processes if processes else _here, {}
    for layout, ways in WAYS.items():
        async with start(model, layout) as client:
            for name, way in ways.items():
                answers[f"{layout}, {name}"] = await way.ask(client, requests)
    return answers


@contextlib.asynccontextmanager
async def _by_processes(model: Path, layout: str) -> AsyncIterator[AsyncOpenAI]:
    flags = (f"--num-pages={PAGES}", f"--chunked-prefill-size={CHUNK}", f"--layout={layout}")
    with serving(Folders(str(model), "ngram"), *flags) as served:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=300) as client:
            yield client


@contextlib.asynccontextmanager
async def _here(model: Path, layout: str) -> AsyncIterator[AsyncOpenAI]:
    speculation = SpeculationConfig(ngram=True)
    engine = EngineConfig(
        str(model), draft=None, num_pages=PAGES, chunk_tokens=CHUNK, speculation=speculation
    )
    roles = [tuple(Role)] if layout == "unified" else [(Role.PREFILL,), (Role.DECODE,)]
    async with real_cluster(engine, model.parent, roles) as cluster:
        yield AsyncOpenAI(base_url="http://gateway/v1", api_key="none", timeout=300, http_client=cluster.http)


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


def main() -> int:
    """Prints the table of the families that are named, or of all; 1 if an answer differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.families_served")
    parser.add_argument("--processes", action="store_true", help="by `eyas serve`")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="(all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, wrong = time.monotonic(), 0
    columns = ("Family", "answers", "transformers", *COLUMNS, "error", "drafts that were right")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for family in args.families or SAMPLES | HYBRIDS:
        try:
            with tempfile.TemporaryDirectory() as folder:
                served = ServedFamily.of(family, Path(folder), processes=args.processes)
        except Exception as failure:  # the others' rows are worth more than this one's traceback
            wrong += 1
            print(f"| {family} | failed: {failure!r} |", flush=True)
        else:
            wrong += served.problems
            print(served.row(), flush=True)
    print(f"\n{wrong} differ; {time.monotonic() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
