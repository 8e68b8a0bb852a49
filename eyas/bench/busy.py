"""An engine that always has the same number of requests: each answered prompt is followed by the next.

Steps are timed while it has them all. The pages of a prompt that it has answered in an earlier batch
are in its cache, so these are figures of decoding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.bench.answering import AnswerLink, EnginePrompt
from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.common.types import TokenEntry
from eyas.engine.ipc.messages import Command, Event, ShutdownEngine


@dataclass
class BatchSteps:
    """The steps of one batch size: seconds, tokens and verified rounds of each."""

    size: int
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    """Tokens of each sequence's round."""
    _last: float | None = None

    def add(self, entries: Sequence[TokenEntry]) -> None:
        """One step while the batch is full; the first one only starts the clock."""
        now = time.perf_counter()
        if self._last is not None:
            self.times.append(now - self._last)
            self.tokens.append(sum(len(entry.tokens) for entry in entries))
            self.rounds += [len(entry.tokens) for entry in entries if entry.index > 0 and not entry.finish]
        self._last = now

    def figures(self) -> dict[str, Any]:
        """Throughput in tokens per second, the median step in ms, tokens per request and round.

        Raises EyasError if the batch was never full for long enough.
        """
        if not self.rounds:
            raise EyasError(f"a batch of {self.size} was never full: more or longer answers are needed")
        return {
            "output_throughput": sum(self.tokens) / sum(self.times),
            "median_step_ms": 1e3 * statistics.median(self.times),
            "accept_length": statistics.mean(self.rounds),
            "steps": len(self.times),
        }


class BatchesLink:
    """The engine's link to one batch size after the other."""

    def __init__(self, links: Sequence[AnswerLink]) -> None:
        self._links = list(links)

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        """Gives the commands for the batch size at hand; the end, after the last one."""
        commands = self._links[0].recv(timeout_s)
        if len(self._links) > 1 and any(isinstance(command, ShutdownEngine) for command in commands):
            self._links.pop(0)
            return self._links[0].recv(timeout_s)
        return commands

    def send(self, events: Sequence[Event]) -> None:
        """Passes the events to the batch size at hand."""
        self._links[0].send(events)


def busy(
    config: EngineConfig, sizes: Sequence[int], prompts: Sequence[EnginePrompt]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answers all prompts with each number of them at a time; (number, figures). The first warms up."""
    import torch

    from eyas.engine.loading.build import build_engine
    from eyas.engine.loading.startup import EngineStart

    start = EngineStart.of(config)
    torch.set_num_threads(config.threads)
    params = SamplingParams(temperature=0.0)
    runs = [BatchSteps(size) for size in (sizes[0], *sizes)]
    links = [AnswerLink(prompts, params, run.size, lambda answer: None, run.add) for run in runs]
    build_engine(config, BatchesLink(links), start).run()
    for run in runs[1:]:
        yield run.size, run.figures()
