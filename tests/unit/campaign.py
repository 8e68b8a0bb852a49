"""Random requests against an engine, many at once, some of them given up: what must leave nothing behind.

It plays the gateway on a `Loopback` cluster of one unified worker. Lengths, n, stop tokens, sampling and
drafting differ from request to request, some follow each other's prompts, some are aborted after a while and
some run out of time; a small pool makes the scheduler preempt. It judges each answer's shape, not its tokens.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause, GenerationRequest, RequestChoice
from eyas.engine.ipc.messages import CancelGeneration, EngineLoad
from tests.unit.loopback import Loopback, Result

POLL_S = 0.001
IDLE_S = 10.0
SHORT_S = 0.02  # the time limit of a request that is meant to miss it


@dataclass(frozen=True)
class Traffic:
    """What is asked for. The largest request must fit into the engine's pool by itself."""

    at_once: int
    vocab_size: int
    longest_prompt: int
    longest_answer: int
    eos_ids: frozenset[int]


@dataclass
class Tally:
    """What became of the requests."""

    finished: int = 0
    aborted: int = 0
    late: int = 0
    tokens: int = 0

    @property
    def requests(self) -> int:
        return self.finished + self.aborted + self.late


@dataclass
class _Running:
    request: GenerationRequest
    result: Result
    abort_at: int | None  # tokens of its first choice after which it is given up


class Campaign:
    """`run` sends requests until they have all ended; it may be called again on the same engine."""

    def __init__(self, cluster: Loopback, traffic: Traffic, seed: int) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._stems = [self._ids(traffic.longest_prompt // 2) for _ in range(8)]  # of prompts that are alike
        self.tally = Tally()

    def run(self, requests: int, seconds: float) -> None:
        """Raises AssertionError for an answer that cannot be, or if they have not ended after `seconds`."""
        deadline = time.monotonic() + seconds
        coming, running = self._coming(requests), []
        while True:
            running += [
                self._submit(r) for r in itertools.islice(coming, self._traffic.at_once - len(running))
            ]
            if not running:
                return
            assert time.monotonic() < deadline, (
                f"{len(running)} requests run after {seconds:g} s: {self.tally}"
            )
            time.sleep(POLL_S)
            running = [one for one in running if not self._ended(one)]

    def idle_load(self) -> EngineLoad:
        """The engine's own figures once nothing runs. Raises AssertionError if something stays held."""
        (worker,) = self._cluster.workers.values()
        give_up = time.monotonic() + IDLE_S
        while True:
            load = worker.load
            assert load is not None
            held = (load.running, load.waiting, load.pages_used, load.leases)
            if not any(held) and not load.pending:
                return load
            assert time.monotonic() < give_up, f"held after the last request: {held}"
            time.sleep(POLL_S)

    # --- requests --------------------------------------------------------------------------------------

    def _coming(self, requests: int) -> Iterator[GenerationRequest]:
        for _ in range(requests):
            yield GenerationRequest(
                id=str(next(self._numbers)),
                prompt_ids=self._prompt(),
                params=self._params(),
                choices=tuple(map(RequestChoice, range(self._random.choice((1,) * 12 + (2, 3, 4))))),
                timeout_s=SHORT_S if self._random.random() < 0.02 else 600.0,
                speculative=self._random.random() < 0.7,
            )

    def _prompt(self) -> tuple[int, ...]:
        stem = self._random.choice(self._stems) if self._random.random() < 0.3 else ()
        rest = self._random.randint(1, self._traffic.longest_prompt - len(stem))
        return (*stem, *self._ids(rest))

    def _params(self) -> SamplingParams:
        pick = self._random
        greedy = pick.random() < 0.5
        few = pick.random() < 0.2
        return SamplingParams(
            max_tokens=pick.randint(1, self._traffic.longest_answer),
            temperature=0.0 if greedy else pick.choice((0.5, 1.0)),
            top_k=0 if greedy else pick.choice((0, 0, 20)),
            top_p=1.0 if greedy else pick.choice((1.0, 1.0, 0.9)),
            frequency_penalty=0.5 if few else 0.0,
            seed=pick.getrandbits(64),
            stop_token_ids=self._ids(8) if pick.random() < 0.3 else (),
            ignore_eos=pick.random() < 0.5,
            logprobs=2 if pick.random() < 0.05 else None,
        )

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self._traffic.vocab_size), k=count))

    # --- their course ----------------------------------------------------------------------------------

    def _submit(self, request: GenerationRequest) -> _Running:
        result = self._cluster.submit(request, split=False)
        aborted = self._random.random() < 0.2
        return _Running(
            request, result, self._random.randint(0, request.params.max_tokens - 1) if aborted else None
        )

    def _ended(self, one: _Running) -> bool:
        tally, result = self.tally, one.result
        if result.done.is_set():
            tally.tokens += sum(map(len, result.tokens.values()))
            if result.failure is None:
                tally.finished += 1
                self._judge(one)
            else:
                assert one.request.timeout_s == SHORT_S, result.failure
                tally.late += 1
        elif one.abort_at is not None and len(result.tokens.get(0, ())) >= one.abort_at:
            self._cluster.by_role["decode"].send(CancelGeneration(one.request.id))
            tally.aborted += 1
        else:
            return False
        return True

    def _judge(self, one: _Running) -> None:
        """Each choice is as long as it says, or ends with a token that may end it."""
        params = one.request.params
        for choice, tokens in one.result.tokens.items():
            if one.result.finishes[choice] is FinishCause.LENGTH:
                assert len(tokens) == params.max_tokens
            else:
                may_end = set(params.stop_token_ids) | (set() if params.ignore_eos else self._traffic.eos_ids)
                assert tokens[-1] in may_end and not may_end.intersection(tokens[:-1])
