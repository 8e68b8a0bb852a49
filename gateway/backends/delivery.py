"""Delivers one request's output to one client: every index of every choice once, in order, bounded.

Workers may repeat tokens (decode repeats token 0, a migrated request overlaps) and a client may read slowly.
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
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    FirstToken,
    GenerationRequest,
    RequestChoice,
    TokenEntry,
)
from gateway.backends.base import FastPath, Lanes

MAX_BUFFERED_STEPS = 1024  # engine steps by which a client may lag behind
_log = logging.getLogger("eyas.gateway")
MAX_TAKEN = 64  # entries at a time: a client that reads again after a while gets no burst of them all


class TokenTimes(msgspec.Struct, frozen=True):
    """The times of a request's tokens so far. Times are monotonic seconds.

    `steps`: entries with new tokens, over all choices; `tokens`: what they had. `began`: when the request
    did; `first`, `last`: when the first and the last of these tokens came.
    """

    choices: int
    steps: int = 0
    tokens: int = 0
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None: there was none."""
        return self.first - self.began if self.steps else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, of one choice in the mean; None: there was none."""
        later = self.tokens / self.choices - 1
        return (self.last - self.first) / later if later > 0 else None


class ChoiceOutput(FastPath):
    """One choice of a delivery: its tokens so far, when the last came (monotonic seconds), how many entries
    had some, and the lane that takes entries while the reader waits, if it has one yet.
    """

    # All streams' entries pass by in turn, so what one touches is in no cache: it lies close together.
    __slots__ = ("_choice", "_delivery", "entries", "ids", "lane", "last")

    def __init__(self, delivery: OutputBuffer, choice: RequestChoice) -> None:
        self._delivery = delivery
        self._choice = choice.index
        self.ids = array("i", choice.output_ids)
        self.lane: FastPath | None = None
        self.entries = 0
        self.last = 0.0

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Gives the lane an entry that has just the next tokens. False: it is to be pushed."""
        lane, ids, tokens = self.lane, self.ids, entry.tokens
        if lane is None or not self._delivery.waits or entry.index != len(ids) or not tokens:
            return False
        try:
            if entry.choice != self._choice or not lane.offer(entry, now):
                return False
        except Exception:
            self._delivery.fail(entry.id)
            return False
        for token in tokens:  # quicker than `extend`, which makes an iterator
            ids.append(token)
        self.last = now
        self.entries += 1
        return True


class OutputBuffer(FastPath):
    """A bounded buffer of entries between the workers' streams and one consumer.

    `push`, `offer`, `close` and `end` neither wait nor raise, so a shared stream can call them; `take` waits.
    `waits`: the reader has dealt with all that it took, and nothing has woken it since.
    """

    __slots__ = (
        *("_began", "_buffer", "_ended", "_error", "_first", "_given", "_lanes", "_limit", "_open"),
        *("_outputs", "_prompt_delivered", "_reader", "_steps", "waits"),
    )

    def __init__(self, choices: Sequence[RequestChoice], limit: int = MAX_BUFFERED_STEPS) -> None:
        self._outputs = {choice.index: ChoiceOutput(self, choice) for choice in choices}
        self._given = self.tokens
        self._began = self._first = time.monotonic()
        self._open = dict(self._outputs)  # those of the choices that go on
        self._steps = limit
        self._limit = limit * max(1, len(choices))  # a step has one entry per choice
        self._buffer: deque[TokenEntry] = deque()
        self._lanes: Lanes | None = None
        self._reader: asyncio.Future[None] | None = None  # what `take` waits for
        self.waits = False
        self._prompt_delivered = False
        self._ended = False
        self._error: EyasError | None = None

    @property
    def complete(self) -> bool:
        """Whether every choice has finished or was closed."""
        return not self._open

    @property
    def begun(self) -> bool:
        """Whether a token has come, beside those that the request began with."""
        return self.tokens > self._given

    @property
    def over(self) -> bool:
        """Whether it takes no more entries: it is complete, or it has ended."""
        return self._ended or not self._open

    @property
    def tokens(self) -> int:
        """How many tokens all choices have so far."""
        return sum(len(output.ids) for output in self._outputs.values())

    @property
    def pace(self) -> TokenTimes:
        """The times of its tokens."""
        outputs = self._outputs.values()
        entries, tokens = sum(output.entries for output in outputs), self.tokens - self._given
        last = max(output.last for output in outputs)
        return TokenTimes(len(outputs), entries, tokens, self._began, self._first, last)

    def is_open(self, choice: int) -> bool:
        """Whether the choice has neither finished nor been closed."""
        return choice in self._open

    def unfinished(self) -> tuple[RequestChoice, ...]:
        """The open choices and the tokens delivered of each: another worker goes on from these."""
        return tuple(RequestChoice(i, tuple(output.ids)) for i, output in self._open.items())

    @property
    def lane(self) -> FastPath | None:
        """The sink of entries that need no push; None: every entry is pushed."""
        if self._lanes is None:
            return None
        return self if len(self._outputs) > 1 else next(iter(self._outputs.values()))

    def use_lanes(self, lanes: Lanes | None) -> None:
        """See `GenerationStream.use_lanes`."""
        self._lanes = lanes
        for output in self._outputs.values():
            output.lane = None

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Gives its choice's lane an entry that has just the next tokens. False: it is to be pushed."""
        output = self._open.get(entry.choice)
        return output is not None and output.offer(entry, now)

    def push(self, entry: TokenEntry) -> None:
        """Buffers what is new in `entry`, unless the lane takes it.

        Tokens with known indices or of closed choices are dropped, timings never; the prompt's
        log-probabilities pass once. A skipped index, or a reader that lags too far behind, ends the delivery
        with an error.
        """
        output = self._outputs.get(entry.choice)
        if output is None:
            return
        now = time.monotonic()
        if output.lane is None and self._lanes is not None and entry.choice in self._open:
            self._begin(output, entry)
        if output.offer(entry, now) or self._ended:
            return
        known = len(output.ids) - entry.index
        if known or entry.prompt is not None or entry.choice not in self._open:
            if known < 0 and entry.choice in self._open:
                self.end(EyasError(f"a worker skipped from output index {len(output.ids)} to {entry.index}"))
                return
            entry = self._news(entry, known)
        if not entry.tokens and (entry.finish, entry.timings, entry.prompt) == (None, None, None):
            return
        if entry.tokens:
            output.ids.extend(entry.tokens)
            self._came(output, now)
        if entry.finish is not None:
            self._shut(entry.choice)
        if len(self._buffer) >= self._limit:
            self._buffer.clear()
            self.end(Cancelled(f"the client reads too slowly: {self._steps} steps were waiting for it"))
            return
        self._buffer.append(entry)
        self._wake()

    def _news(self, entry: TokenEntry, known: int) -> TokenEntry:
        """Returns the new part of an entry: without its first `known` tokens; nothing of a closed choice."""
        if entry.prompt is not None:
            if self._prompt_delivered:
                entry = msgspec.structs.replace(entry, prompt=None)
            self._prompt_delivered = True
        if entry.choice not in self._open:
            return _without_news(entry)
        return _without_first(entry, known) if known else entry

    def close(self, choice: int) -> None:
        """Drops everything that still comes for this choice."""
        self._shut(choice)
        self._wake()

    def end(self, error: EyasError | None = None) -> None:
        """Takes no more entries. What is buffered is still delivered, then `error` is raised if given."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def fail(self, request: str) -> None:
        """Ends it for the defect that is being handled."""
        _log.exception("request %s failed", request)
        self.end(EyasError("internal error"))

    async def take(self) -> Sequence[TokenEntry]:
        """The next entries, at most MAX_TAKEN; () at the end. Raises the error the request ended with."""
        while not (buffer := self._buffer):
            if self._error is not None:
                raise self._error
            if self.over:
                return ()
            # A bare future: this runs for every step, and an asyncio.Event would double the cost.
            self._reader = asyncio.get_running_loop().create_future()
            self.waits = True
            try:
                await self._reader
            finally:
                self._reader, self.waits = None, False
        if len(buffer) > MAX_TAKEN:
            return [buffer.popleft() for _ in range(MAX_TAKEN)]
        self._buffer = deque()
        return buffer

    def _begin(self, output: ChoiceOutput, entry: TokenEntry) -> None:
        """The choice has a lane from now on, if there is one by now."""
        assert self._lanes is not None
        try:
            output.lane = self._lanes(entry.choice)
        except Exception:
            self.fail(entry.id)

    def _came(self, output: ChoiceOutput, now: float) -> None:
        """Notes new tokens of a choice, which came now."""
        if not any(known.entries for known in self._outputs.values()):
            self._first = now
        output.last = now
        output.entries += 1

    def _shut(self, choice: int) -> None:
        """The choice takes nothing more."""
        if self._open.pop(choice, None) is not None:
            self._outputs[choice].lane = None

    def _wake(self) -> None:
        if self.waits and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        self.waits = False


def _without_first(entry: TokenEntry, known: int) -> TokenEntry:
    """`entry` without its first `known` tokens. If it has fewer, nothing in it is new."""
    if known > len(entry.tokens):
        ends = entry.finish is FinishCause.ABORT  # wherever it was: others end after their last token
        return msgspec.structs.replace(_without_news(entry), finish=FinishCause.ABORT if ends else None)
    return msgspec.structs.replace(
        entry, index=entry.index + known, tokens=entry.tokens[known:], logprobs=entry.logprobs[known:]
    )


def _without_news(entry: TokenEntry) -> TokenEntry:
    """`entry` with its timings and the prompt's log-probabilities only."""
    return msgspec.structs.replace(entry, tokens=(), logprobs=(), finish=None, accepted=0, offered=0)


def first_entry(
    request: GenerationRequest, attempt: int, first: FirstToken, timings: EngineTimings | None
) -> TokenEntry:
    """Token 0 of a choice, as prefill gave it: no token if the request wants none."""
    limit = request.params.max_tokens
    return TokenEntry(
        id=request.id,
        attempt=attempt,
        choice=first.choice,
        index=0,
        tokens=(first.token,)[:limit],
        logprobs=() if first.logprob is None else (first.logprob,)[:limit],
        finish=first.finish,
        timings=timings,
        prompt=first.prompt,
    )
