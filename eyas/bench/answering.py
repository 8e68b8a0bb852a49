"""An engine of this process that answers prompts: the serving one, without a server.

It keeps the engine's queue full and gathers what it says. A busy engine always has the same number of
requests: each answered prompt is followed by the next. Its steps are timed while it has them all. The pages
of a prompt that it has answered in an earlier batch are in its cache, so these are figures of decoding.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, TokenEntry
from eyas.engine.ipc.messages import (
    Command,
    EngineStopped,
    Event,
    RequestFailed,
    RequestRejected,
    ShutdownEngine,
    StepReply,
    SubmitGeneration,
)

TIMEOUT_S = 3600.0  # of a request: the queue is long


@dataclass
class EngineAnswer:
    """The answer of an engine to prompt `number`. `rounds`: (accepted, offered) of every step with drafts."""

    number: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class EnginePrompt:
    """Ids to be continued by at most `longest`, and the number that names the answer."""

    number: int
    ids: Sequence[int]
    longest: int


class AnswerLink:
    """The engine's link to a list of prompts, `ahead` of which it has at a time; it ends with the last one.

    `tell` is called with each answer when it is complete, `saw` with the entries of each step while as many
    prompts are open as may be. Every prompt has a seed of its own, from that of `params` on. A prompt that
    the engine refuses raises EyasError.
    """

    def __init__(
        self,
        prompts: Iterable[EnginePrompt],
        params: SamplingParams,
        ahead: int,
        tell: Callable[[EngineAnswer], None],
        saw: Callable[[Sequence[TokenEntry]], None] = lambda entries: None,
    ) -> None:
        self._prompts = iter(prompts)
        self._params = params
        self._ahead = ahead
        self._tell = tell
        self._saw = saw
        self._open: dict[str, EngineAnswer] = {}

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        """Gives as many prompts as there is room for; when all are answered, the end."""
        new = list(itertools.islice(self._prompts, self._ahead - len(self._open)))
        self._open |= {str(prompt.number): EngineAnswer(prompt.number) for prompt in new}
        if not self._open:
            return [ShutdownEngine()]
        if not new:
            time.sleep(timeout_s)
        return [SubmitGeneration(self._request(prompt), attempt=1, attach=False) for prompt in new]

    def send(self, events: Sequence[Event]) -> None:
        """Gathers tokens; raises EyasError for what is not an answer."""
        for event in events:
            if isinstance(event, StepReply):
                if len(self._open) == self._ahead:
                    self._saw(event.entries)
                for entry in event.entries:
                    self._add(entry)
            elif isinstance(event, RequestRejected | RequestFailed):
                raise EyasError(f"prompt {event.id} was not answered: {event.failure.message}")
            elif isinstance(event, EngineStopped) and event.failure is not None:
                raise EyasError(f"the engine ended: {event.failure.message}")

    def _request(self, prompt: EnginePrompt) -> GenerationRequest:
        seed = self._params.seed + prompt.number
        params = msgspec.structs.replace(self._params, max_tokens=prompt.longest, seed=seed)
        return GenerationRequest(
            str(prompt.number), tuple(prompt.ids), params, (RequestChoice(0),), timeout_s=TIMEOUT_S
        )

    def _add(self, entry: TokenEntry) -> None:
        answer = self._open[entry.id]
        answer.tokens += entry.tokens
        if entry.offered:
            answer.rounds.append((entry.accepted, entry.offered))
        if entry.finish is not None:
            self._tell(self._open.pop(entry.id))


def answer(
    config: EngineConfig,
    prompts: Iterable[EnginePrompt],
    params: SamplingParams,
    tell: Callable[[EngineAnswer], None],
) -> None:
    """Loads the engine, answers all prompts and ends it. `tell` is called in the order of completion.

    As many prompts as may run are open, and as many wait, but no more than the engine lets wait: it has
    all of the first ones before one of them runs.
    """
    from eyas.engine.loading.build import build_engine
    from eyas.engine.loading.startup import EngineStart

    link = AnswerLink(prompts, params, min(2 * config.max_running, config.max_waiting), tell)
    build_engine(config, link, EngineStart.of(config)).run()


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
