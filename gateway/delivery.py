"""Delivers one request's output to one client: every index of every choice once, in order, bounded.

Workers may repeat tokens (decode repeats token 0, a migrated request overlaps) and a client may read slowly.
This file knows output indices and buffer sizes; it refuses to know who sent an entry and why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Sequence

import msgspec

from eyas.common.errors import Cancelled, EyasError
from eyas.common.types import Choice, Entry, FirstToken, GenerationRequest, Timings
from gateway.backend import Lane

MAX_BUFFERED_STEPS = 1024  # engine steps by which a client may lag behind
_log = logging.getLogger("eyas.gateway")
MAX_TAKEN = 64  # entries at a time: a client that reads again after a while gets no burst of them all


class Pace:
    """When the tokens of a request came. Times are monotonic seconds; it begins when it is made.

    `steps`: entries with new tokens, over all choices; `tokens`: what they had.
    """

    __slots__ = ("_began", "_choices", "_first", "_last", "steps", "tokens")

    def __init__(self, choices: int) -> None:
        self.steps = 0
        self.tokens = 0
        self._choices = choices
        self._began = self._first = self._last = time.monotonic()

    def came(self, tokens: int, now: float) -> None:
        """Counts new tokens of a choice, which came now."""
        self._last = now
        if not self.steps:
            self._first = now
        self.steps += 1
        self.tokens += tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None: there was none."""
        return self._first - self._began if self.steps else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, of one choice in the mean; None: there was none."""
        later = self.tokens / self._choices - 1
        return (self._last - self._first) / later if later > 0 else None


class Delivery:
    """A bounded buffer of entries between the workers' streams and one consumer.

    `push`, `offer`, `close` and `end` neither wait nor raise, so a shared stream can call them; `take` waits.
    `lane`: what entries are offered to while the consumer waits for the next.
    """

    # All streams' rows pass by in turn, so what a row touches is in no cache: slots are half of it.
    __slots__ = (
        *("_buffer", "_ended", "_error", "_limit", "_open", "_outputs", "_prompt_delivered", "_reader"),
        *("_steps", "_waits", "lane", "pace"),
    )

    def __init__(self, choices: Sequence[Choice], limit: int = MAX_BUFFERED_STEPS) -> None:
        self._outputs = {c.index: array("i", c.output_ids) for c in choices}
        self.pace = Pace(len(choices))
        self._open = dict(self._outputs)  # those of the choices that go on
        self._steps = limit
        self._limit = limit * max(1, len(choices))  # a step has one entry per choice
        self._buffer: deque[Entry] = deque()
        self.lane: Lane | None = None
        self._reader: asyncio.Future[None] | None = None  # what `take` waits for
        self._waits = False  # the reader has dealt with all that it took, and nothing has woken it since
        self._prompt_delivered = False
        self._ended = False
        self._error: EyasError | None = None

    @property
    def complete(self) -> bool:
        """Whether every choice has finished or was closed."""
        return not self._open

    @property
    def over(self) -> bool:
        """Whether it takes no more entries: it is complete, or it has ended."""
        return self._ended or not self._open

    @property
    def tokens(self) -> int:
        """How many tokens all choices have so far."""
        return sum(len(ids) for ids in self._outputs.values())

    def is_open(self, choice: int) -> bool:
        """Whether the choice has neither finished nor been closed."""
        return choice in self._open

    def unfinished(self) -> tuple[Choice, ...]:
        """The open choices and the tokens delivered of each: another worker goes on from these."""
        return tuple(Choice(i, tuple(ids)) for i, ids in self._open.items())

    def offer(self, entry: Entry, now: float) -> bool:
        """Gives the lane an entry that has just the next tokens. False: it is to be pushed."""
        lane, output, tokens = self.lane, self._open.get(entry.choice), entry.tokens
        if lane is None or output is None or not self._waits or entry.index != len(output) or not tokens:
            return False
        try:
            if not lane(entry, now):
                return False
        except Exception:
            _log.exception("request %s failed", entry.id)
            self.end(EyasError("internal error"))
            return False
        for token in tokens:  # quicker than `extend`, which makes an iterator
            output.append(token)
        self.pace.came(len(tokens), now)
        return True

    def push(self, entry: Entry) -> None:
        """Buffers what is new in `entry`, unless the lane takes it.

        Tokens with known indices or of closed choices are dropped, timings never; the prompt's
        log-probabilities pass once. A skipped index, or a reader that lags too far behind, ends the delivery
        with an error.
        """
        output = self._outputs.get(entry.choice)
        now = time.monotonic()
        if output is None or self.offer(entry, now) or self._ended:
            return
        known = len(output) - entry.index
        if known or entry.prompt is not None or entry.choice not in self._open:
            if known < 0 and entry.choice in self._open:
                self.end(EyasError(f"a worker skipped from output index {len(output)} to {entry.index}"))
                return
            entry = self._news(entry, known)
        if not entry.tokens and (entry.finish, entry.timings, entry.prompt) == (None, None, None):
            return
        if entry.tokens:
            output.extend(entry.tokens)
            self.pace.came(len(entry.tokens), now)
        if entry.finish is not None:
            self._open.pop(entry.choice, None)
        if len(self._buffer) >= self._limit:
            self._buffer.clear()
            self.end(Cancelled(f"the client reads too slowly: {self._steps} steps were waiting for it"))
            return
        self._buffer.append(entry)
        self._wake()

    def _news(self, entry: Entry, known: int) -> Entry:
        """What is new in an entry whose first `known` tokens are not, or whose choice is closed."""
        if entry.prompt is not None:
            if self._prompt_delivered:
                entry = msgspec.structs.replace(entry, prompt=None)
            self._prompt_delivered = True
        if entry.choice not in self._open:
            return _without_news(entry)
        return _without_first(entry, known) if known else entry

    def close(self, choice: int) -> None:
        """Drops everything that still comes for this choice."""
        self._open.pop(choice, None)
        self._wake()

    def end(self, error: EyasError | None = None) -> None:
        """Takes no more entries. What is buffered is still delivered, then `error` is raised if given."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    async def take(self) -> Sequence[Entry]:
        """The next entries, at most MAX_TAKEN; () at the end. Raises the error the request ended with."""
        while not (buffer := self._buffer):
            if self._error is not None:
                raise self._error
            if self.over:
                return ()
            # A bare future: this runs for every step, and an asyncio.Event would double the cost.
            self._reader = asyncio.get_running_loop().create_future()
            self._waits = True
            try:
                await self._reader
            finally:
                self._reader, self._waits = None, False
        if len(buffer) > MAX_TAKEN:
            return [buffer.popleft() for _ in range(MAX_TAKEN)]
        self._buffer = deque()
        return buffer

    def _wake(self) -> None:
        if self._waits and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        self._waits = False


def _without_first(entry: Entry, known: int) -> Entry:
    """`entry` without its first `known` tokens. If it has fewer, nothing in it is new."""
    if known > len(entry.tokens):
        return _without_news(entry)
    return msgspec.structs.replace(
        entry, index=entry.index + known, tokens=entry.tokens[known:], logprobs=entry.logprobs[known:]
    )


def _without_news(entry: Entry) -> Entry:
    """`entry` with its timings and the prompt's log-probabilities only."""
    return msgspec.structs.replace(entry, tokens=(), logprobs=(), finish=None, accepted=0, offered=0)


def first_entry(
    request: GenerationRequest, attempt: int, first: FirstToken, timings: Timings | None
) -> Entry:
    """Token 0 of a choice, as prefill gave it: no token if the request wants none."""
    wanted = request.params.max_tokens
    return Entry(
        id=request.id,
        attempt=attempt,
        choice=first.choice,
        index=0,
        tokens=(first.token,)[:wanted],
        logprobs=() if first.logprob is None else (first.logprob,)[:wanted],
        finish=first.finish,
        timings=timings,
        prompt=first.prompt,
    )
