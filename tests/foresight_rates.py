"""How often a verdict was foreseen, and how long rounds were: the embedded model and its head, no clock.

`python -m tests.foresight_rates` prints a table: for each temperature and number of outcomes the share of
rounds whose proposal was ready, and tokens per round. Everything that is drafted ahead is ready in time here,
so the figures are of the heads, not of the machine. Others than the embedded ones: `--target`, `--draft`, and
`--prompts`, JSON lines as `eyas train` takes them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.common.config import NANO, NANO_HEAD
from eyas.common.params import SamplingParams
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.sampling.sampler import SampledRow, sample
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, DraftRequest
from eyas.engine.speculation.drafters.ahead import VerifiedRound, fan_out
from eyas.engine.speculation.verify import walk
from eyas.train.conversations import ChatTokenizer, read_lines
from gateway.text.tokenizer import Tokenizer
from tests.unit import plain_ahead
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.plain_ahead import Ahead, Chain, ChainRunner, advance
from tools.nano.heldout import heldout_prompts

STEPS, PROMPTS, MOST_TOKENS, MOST_ROWS = 5, 24, 64, 900
OUTCOMES = (0, 2, 4, 8, 16)


@dataclass
class Counts:
    """Rounds and tokens by how their proposal was made; accepted and refused drafts."""

    rounds: int = 0
    tokens: int = 0
    hits: int = 0
    tokens_of_hits: int = 0
    accepted: float = 1.0
    refused: float = 1.0

    @property
    def acceptance(self) -> float:
        return self.accepted / (self.accepted + self.refused)

    def round(self, accepted: int, *, hit: bool) -> None:
        self.rounds += 1
        self.tokens += accepted + 1
        self.hits += hit
        self.tokens_of_hits += (accepted + 1) * hit
        self.accepted += accepted
        self.refused += accepted < STEPS


class Story:
    """One answer, generated round by round; `outcomes` are drafted ahead in each (0: none)."""

    def __init__(self, rig: Rig, head: HeadRig, outcomes: int) -> None:
        self._rig, self._head, self._outcomes = rig, head, outcomes
        self._runner = ChainRunner(head.head, head.pool, head.backend)
        self._pages = list(range(-(-(MOST_ROWS + 400) // 16)))

    def tell(self, prompt: tuple[int, ...], params: SamplingParams, counts: Counts) -> list[int]:
        tokens, features = self._target(0, list(prompt), params, len(prompt) - 1)
        text = [*prompt, *tokens]
        certain = self._extension(0, text, features)
        chain, hit = self._propose(certain, params), False
        end = self._rig.config.eos_token_ids[0]
        while len(text) < len(prompt) + MOST_TOKENS and end not in text[len(prompt) :]:
            base = len(text) - 1
            ahead = self._ahead(certain, chain, params, counts.acceptance)
            sampled, features = self._target(base, [text[-1], *chain.tokens], params, 0)
            verdict = walk(chain.tree, sampled)
            counts.round(len(verdict.path), hit=hit)
            text += verdict.tokens
            certain = self._extension(base, text, features[: len(verdict.tokens)])
            answer = ahead.answer(verdict.tokens, STEPS) if ahead else None
            hit = answer is not None
            chain = answer or self._propose(certain, params)
        said = text[len(prompt) :][:MOST_TOKENS]
        return said[: said.index(end)] if end in said else said

    def _target(
        self, base: int, tokens: list[int], params: SamplingParams, first: int
    ) -> tuple[list[int], torch.Tensor]:
        """Samples at the rows from `first` on; the features of all."""
        span = QuerySpan(self._pages, base, len(tokens))
        rows, tapped = self._rig.forward([span], tokens, self._head.capture.layers)
        noise = [SampledRow(params, 0, base + i + 1, (), (), ()) for i in range(first, len(tokens))]
        sampled = sample(self._rig.model.logits(rows[first:]), noise)
        return sampled.tokens, self._head.capture.features(tapped)

    def _extension(self, base: int, text: list[int], features: torch.Tensor) -> DraftExtension:
        return DraftExtension(self._pages, base, text[base + 1 : base + 1 + len(features)], features)

    def _propose(self, certain: DraftExtension, params: SamplingParams) -> Chain:
        [last] = self._runner.extend([certain])
        row = certain.base + len(certain.tokens)
        return self._runner.chain(DraftRequest(self._pages, row, last, params, 0), STEPS)

    def _ahead(
        self, certain: DraftExtension, chain: Chain, params: SamplingParams, acceptance: float
    ) -> Ahead | None:
        if not self._outcomes:
            return None
        verified = VerifiedRound(DraftInput(0, certain, params, 0), chain)
        ahead = Ahead(verified, fan_out(STEPS, acceptance, self._outcomes))
        while not ahead.drafted:
            advance(self._runner, [ahead])
        return ahead


@dataclass(frozen=True)
class Case:
    """A target, a head and what is asked; `outcomes`: numbers of them. All but the folders may be cut."""

    target: Path
    draft: Path
    prompts: Sequence[Sequence[int]]
    outcomes: Sequence[int] = OUTCOMES
    threads: int = 1


def figures(case: Case) -> Iterator[tuple[float, int, Counts]]:
    """Temperature, outcomes, what was counted. The answers are the same whatever is drafted."""
    rig = Rig(case.target, pages=512)
    head = HeadRig(case.draft, rig)
    torch.set_num_threads(case.threads)
    for temperature in (0.0, 1.0):
        expected = None
        for outcomes in case.outcomes:
            plain_ahead.OUTCOMES = outcomes
            counts, story = Counts(), Story(rig, head, outcomes)
            answers = [
                story.tell(tuple(prompt), SamplingParams(temperature=temperature, seed=i), counts)
                for i, prompt in enumerate(case.prompts)
            ]
            assert expected in (None, answers), "drafts have changed a token"
            expected = answers
            yield temperature, outcomes, counts


def embedded_prompts() -> list[tuple[int, ...]]:
    """Held-out chats of the embedded model."""
    tokenizer = Tokenizer.load(NANO)
    return [asyncio.run(tokenizer.encode_chat(chat)) for chat in heldout_prompts(PROMPTS, 1)]


def prompts_in(file: Path, target: Path) -> list[list[int]]:
    """The questions of a file, in the target's ids."""
    speech = ChatTokenizer(target)
    return [ids for line in read_lines(file, "prompts")[:PROMPTS] if (ids := speech.question(line))]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=NANO)
    parser.add_argument("--draft", type=Path, default=NANO_HEAD)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="(held-out chats of the embedded model)")
    parser.add_argument("--outcomes", type=int, nargs="+", default=list(OUTCOMES))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    prompts = prompts_in(given.prompts, given.target) if given.prompts else embedded_prompts()
    print("| temperature | outcomes | foreseen | tokens per round | of foreseen ones | of the others |")
    print("|---|---|---|---|---|---|")
    for temperature, outcomes, c in figures(
        Case(given.target, given.draft, prompts, given.outcomes, given.threads)
    ):
        foreseen = c.tokens_of_hits / max(c.hits, 1)
        others = (c.tokens - c.tokens_of_hits) / max(c.rounds - c.hits, 1)
        cells = (f"{c.hits / c.rounds:.2f}", f"{c.tokens / c.rounds:.2f}", f"{foreseen:.2f}", f"{others:.2f}")
        print("|", " | ".join((str(temperature), str(outcomes), *cells)), "|", flush=True)


if __name__ == "__main__":
    torch.inference_mode()(main)()
