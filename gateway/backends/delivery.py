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
    """The times of a request's tokens so far, in monotonic seconds.

    `steps`: the number of entries with new tokens, over all choices; `tokens`: the number of these tokens.
    `began`: the start of the request; `first`, `last`: the arrival of the first and the last token.
    """

    choices: int
    steps: int = 0
    tokens: int = 0
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None without a token."""
        return self.first - self.began if self.steps else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, in the mean over choices; None without a second token."""
        later = self.tokens / self.choices - 1
        return (self.last - self.first) / later if later > 0 else None


class ChoiceOutput(FastPath):
    """The output of one choice.

    `ids`: its tokens so far. `last`: when the last one arrived (monotonic seconds). `entries`: the number of
    entries with tokens. `lane`: takes entries while the reader waits; None: there is none yet.
    """

    # Entries of all streams alternate, so these fields are rarely in the CPU's cache: slots pack them.
    __slots__ = ("_choice", "_delivery", "entries", "ids", "lane", "last")

    def __init__(self, delivery: OutputBuffer, choice: RequestChoice) -> None:
        self._delivery = delivery
        self._choice = choice.index
        self.ids = array("i", choice.output_ids)
        self.lane: FastPath | None = None
        self.entries = 0
        self.last = 0.0

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Passes an entry that has exactly the next tokens to the lane. False: the entry must be pushed."""
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
    """A bounded buffer of entries between the streams of the workers and one reader.

    `push`, `offer`, `close` and `end` neither wait nor raise, so a shared stream can call them; `take` waits.
    `waits`: the reader has processed all entries that it took and has not been woken since.
    """

    __slots__ = (
        *("_began", "_buffer", "_ended", "_error", "_first", "_initial_tokens", "_lanes", "_limit", "_open"),
        *("_outputs", "_prompt_delivered", "_reader", "_steps", "waits"),
    )

    def __init__(self, choices: Sequence[RequestChoice], limit: int = MAX_BUFFERED_STEPS) -> None:
        self._outputs = {choice.index: ChoiceOutput(self, choice) for choice in choices}
        self._initial_tokens = self.tokens
        self._began = self._first = time.monotonic()
        self._open = dict(self._outputs)  # of the unfinished choices
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
        """Whether there is a token besides those that the request began with."""
        return self.tokens > self._initial_tokens

    @property
    def over(self) -> bool:
        """Whether no more entries are taken: every choice is complete, or the delivery has ended."""
        return self._ended or not self._open

    @property
    def tokens(self) -> int:
        """The number of tokens of all choices so far."""
        return sum(len(output.ids) for output in self._outputs.values())

    @property
    def token_times(self) -> TokenTimes:
        """The times of the tokens so far."""
        outputs = self._outputs.values()
        entries, tokens = sum(output.entries for output in outputs), self.tokens - self._initial_tokens
        last = max(output.last for output in outputs)
        return TokenTimes(len(outputs), entries, tokens, self._began, self._first, last)

    def is_open(self, choice: int) -> bool:
        """Whether the choice has neither finished nor been closed."""
        return choice in self._open

    def unfinished(self) -> tuple[RequestChoice, ...]:
        """The open choices with their delivered tokens, from which another worker can continue."""
        return tuple(RequestChoice(i, tuple(output.ids)) for i, output in self._open.items())

    @property
    def lane(self) -> FastPath | None:
        """Takes the entries that need no push; None: every entry is pushed."""
        if self._lanes is None:
            return None
        return self if len(self._outputs) > 1 else next(iter(self._outputs.values()))

    def use_lanes(self, lanes: Lanes | None) -> None:
        """See `GenerationStream.use_lanes`."""
        self._lanes = lanes
        for output in self._outputs.values():
            output.lane = None

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Passes an entry that has exactly the next tokens to its choice's lane. False: it must be pushed."""
        output = self._open.get(entry.choice)
        return output is not None and output.offer(entry, now)

    def push(self, entry: TokenEntry) -> None:
        """Buffers the new part of `entry`, unless the lane takes the entry.

        Tokens with known indices or of closed choices are dropped, timings never. The log-probabilities of
        the prompt are delivered once. A skipped index, or a reader that lags too far behind, ends the
        delivery with an error.
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
            entry = self._new_part(entry, known)
        if not entry.tokens and (entry.finish, entry.timings, entry.prompt) == (None, None, None):
            return
        if entry.tokens:
            output.ids.extend(entry.tokens)
            self._record_arrival(output, now)
        if entry.finish is not None:
            self._remove(entry.choice)
        if len(self._buffer) >= self._limit:
            self._buffer.clear()
            self.end(Cancelled(f"the client reads too slowly: {self._steps} steps were waiting for it"))
            return
        self._buffer.append(entry)
        self._wake()

    def _new_part(self, entry: TokenEntry, known: int) -> TokenEntry:
        """Returns an entry without its first `known` tokens; without any tokens for a closed choice."""
        if entry.prompt is not None:
            if self._prompt_delivered:
                entry = msgspec.structs.replace(entry, prompt=None)
            self._prompt_delivered = True
        if entry.choice not in self._open:
            return _without_new_part(entry)
        return _without_first(entry, known) if known else entry

    def close(self, choice: int) -> None:
        """Ends a choice: further entries for it are dropped."""
        self._remove(choice)
        self._wake()

    def end(self, error: EyasError | None = None) -> None:
        """Takes no more entries. Buffered entries are still delivered, then `error` is raised if given."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def fail(self, request: str) -> None:
        """Ends the delivery with an internal error and logs the exception that is being handled."""
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
        """Gives the choice its lane, if there is one by now."""
        assert self._lanes is not None
        try:
            output.lane = self._lanes(entry.choice)
        except Exception:
            self.fail(entry.id)

    def _record_arrival(self, output: ChoiceOutput, now: float) -> None:
        """Records that new tokens of a choice have arrived."""
        if not any(known.entries for known in self._outputs.values()):
            self._first = now
        output.last = now
        output.entries += 1

    def _remove(self, choice: int) -> None:
        """Removes the choice from the open ones, with its lane."""
        if self._open.pop(choice, None) is not None:
            self._outputs[choice].lane = None

    def _wake(self) -> None:
        if self.waits and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        self.waits = False


def _without_first(entry: TokenEntry, known: int) -> TokenEntry:
    """`entry` without its first `known` tokens; without any new part if it has fewer."""
    if known > len(entry.tokens):
        ends = entry.finish is FinishCause.ABORT  # at any index: other causes come after the last token
        return msgspec.structs.replace(_without_new_part(entry), finish=FinishCause.ABORT if ends else None)
    return msgspec.structs.replace(
        entry, index=entry.index + known, tokens=entry.tokens[known:], logprobs=entry.logprobs[known:]
    )


def _without_new_part(entry: TokenEntry) -> TokenEntry:
    """`entry` with its timings and the prompt's log-probabilities only."""
    return msgspec.structs.replace(entry, tokens=(), logprobs=(), finish=None, accepted=0, offered=0)


def first_entry(
    request: GenerationRequest, attempt: int, first: FirstToken, timings: EngineTimings | None
) -> TokenEntry:
    """The entry of token 0 of a choice, as prefill returned it; without the token if `max_tokens` is 0."""
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
