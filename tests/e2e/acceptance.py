"""Tokens per verify step at a temperature: what drafts gain that know the seed.

The embedded model answers held-out prompts in this process. Three ways of speculating are counted:

* coupled: drafts are ranked by the head's logits and the request's own noise, as Eyas does it;
* blind: drafts are ranked by the head's logits alone. Answers are the same, more rounds make them;
* target-only sampling (the rule of SGLang and flashinfer) on the same trees and logits as blind: a child is
  accepted with the target's probability of it, so a round has 1 + the sum over its nodes of the target's
  probability of their paths, in the mean.

`python -m tests.e2e.acceptance` prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from eyas.common.config import NANO, NANO_HEAD, EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.tree import DraftTree
from eyas.engine.sampling.processors import SampledRow
from eyas.engine.sampling.sampler import SampledTokens, sample
from eyas.engine.speculation.draft_worker.draft_runner import DraftRequest
from eyas.engine.speculation.verify import TreeVerdict, walk
from gateway.text.tokenizer import Tokenizer
from tests.e2e.lossless_ways import InProcess, Task
from tools.nano.heldout import heldout_prompts

SHAPES = {
    "chain of 5": SpeculationConfig(5),
    "tree of 16, top 4": SpeculationConfig(5, 4, 16),
    "tree of 60, top 8": SpeculationConfig(7, 8, 60),
}
MAX_TOKENS = 128
TOGETHER = 8


@dataclass
class Rounds:
    """Rounds with drafts, the tokens that they gave, and those that target-only sampling gives in the mean.

    The end of an answer cuts none of them, so that both are counted alike.
    """

    count: int = 0
    tokens: int = 0
    target_only: float = 0.0

    def walk(self, tree: DraftTree | None, chosen: Sequence[int]) -> TreeVerdict:
        """In the place of `verify.walk`."""
        verdict = walk(tree, chosen)
        self.count += 1
        self.tokens += len(verdict.tokens)
        return verdict

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> SampledTokens:
        """In the place of `sampler.sample`; each tree's rows stand together, its root's first."""
        reached: dict[tuple[int, ...], float] = {}  # chance that sampling comes to a node, by its path
        chances: dict[tuple[int, ...], Tensor] = {}
        for row, own in zip(rows, logits, strict=True):
            path = tuple(row.ancestors)
            if not path:
                reached, chances = {(): 1.0}, {}
            else:
                reached[path] = reached[path[:-1]] * float(chances[path[:-1]][path[-1]])
                self.target_only += reached[path] + (
                    len(reached) == 2
                )  # the first draft: a round's own token
            chances[path] = (own / row.params.temperature).softmax(-1)
        return sample(logits, rows)


def blind(request: DraftRequest, position: int) -> SampledRow:
    """The row of a drafter that does not know the seed."""
    return SampledRow(SamplingParams(temperature=0.0), request.choice, position, (), (), ())


@contextlib.contextmanager
def counted(rounds: Rounds, *, coupled: bool) -> Iterator[None]:
    """Engines of this process count into `rounds`."""
    with contextlib.ExitStack() as patches:
        for name in ("walk", "sample"):
            patches.enter_context(mock.patch(f"eyas.engine.loop.plain_runner.{name}", getattr(rounds, name)))
        if not coupled:
            patches.enter_context(mock.patch("eyas.engine.speculation.draft_worker.draft_runner._row", blind))
        yield


def measure(config: EngineConfig, requests: tuple[GenerationRequest, ...], *, coupled: bool) -> Rounds:
    """All requests through an engine of its own."""
    rounds = Rounds()
    with counted(rounds, coupled=coupled):
        InProcess((config,), TOGETHER).serve(Task(requests, {}, lambda: None))
    return rounds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.acceptance", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--draft", type=Path, nargs="+", default=[NANO_HEAD], metavar="DIR", help="heads")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(NANO)
    prompts = [asyncio.run(tokenizer.encode_chat(c)) for c in heldout_prompts(given.prompts, given.seed)]
    table = Table(title="tokens per verify step")
    for name in ("head", "temperature", "drafts", "rounds", "coupled", "blind", "target-only"):
        table.add_column(name, justify="left" if name in ("head", "drafts") else "right")
    cases = [(head, t, name) for head in given.draft for t in given.temperature for name in SHAPES]
    for head, t, name in track(cases, description="acceptance"):
        config = EngineConfig(draft=str(head), worker="unified", speculation=SHAPES[name])
        params = [SamplingParams(temperature=t, seed=i, max_tokens=MAX_TOKENS) for i in range(len(prompts))]
        pairs = zip(prompts, params, strict=True)
        requests = tuple(GenerationRequest(str(i), *pair) for i, pair in enumerate(pairs))
        ours, theirs = (measure(config, requests, coupled=coupled) for coupled in (True, False))
        means = [ours.tokens / ours.count, theirs.tokens / theirs.count]
        means += [theirs.target_only / theirs.count] if t else []  # greedy answers are not sampled
        table.add_row(head.name, f"{t:g}", name, str(ours.count), *(f"{mean:.3f}" for mean in means))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    main()
