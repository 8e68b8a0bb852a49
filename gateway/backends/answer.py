"""Runs a call: admits every prompt, then merges the deltas of all of its choices into one stream.

All generations of a call are closed when one fails.

Most tokens take a fast path (a lane) from a worker's message to the client's connection, without waking a
task. An entry that only adds tokens to a choice is written immediately, by one chain of calls, while the
reader of the stream waits. All other entries go through the reader (`TextStream.take`, `EventFormat.event`,
`WireReply.write`), and so do all entries while the client reads slowly. The reader's path is the
specification: the fast path sends the same bytes sooner. It writes to `BodyParts`, by which an HTTP server
bypasses the layers of calls around ASGI's `send`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache, partial
from typing import Protocol

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.types import FIRST_VERSION, GenerationRequest, TokenEntry
from gateway.backends.base import FastPath, GenerationBackend
from gateway.formats.openai_request import ApiCall
from gateway.observe.metrics import CallMeter, TokenRhythm
from gateway.text.detokenize import Detokenizer
from gateway.text.entries import RequestTrace, TextDelta, TextStream, UsageCounts
from gateway.text.tokenizer import Tokenizer

TextEvent = Callable[[int, str], bytes]
"""(choice, text): the event that only adds text to a choice."""
_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a placeholder for the text of an event: nothing else in one equals it
PARTS = "eyas.parts"
"""The key of an ASGI scope under which a server may offer the `BodyParts` of its response."""


class CallAnswer:
    """The admitted generations of one call, one per prompt with `n` choices each."""

    def __init__(self, streams: Sequence[TextStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self._reads: dict[asyncio.Task[Sequence[TextDelta]], int] = {}  # of several prompts: by number
        if len(streams) > 1:
            for prompt in range(len(streams)):
                self._read(prompt)

    @property
    def traces(self) -> list[RequestTrace]:
        """The trace of each prompt so far."""
        return [stream.trace for stream in self._streams]

    @property
    def weight_versions(self) -> list[str]:
        """The name of the weights that answer each prompt."""
        return [stream.weight_version for stream in self._streams]

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that name the weights of the answers; {} until the weights were first updated.

        Prompts of one call may be answered by different weights: then all are named.
        """
        versions = dict.fromkeys(self.weight_versions)
        return {} if [*versions] == [FIRST_VERSION] else {"weight_version": ",".join(versions)}

    @property
    def usage(self) -> UsageCounts:
        """The sum over the prompts so far."""
        counts = [msgspec.structs.astuple(stream.usage) for stream in self._streams]
        return UsageCounts(*map(sum, zip(*counts, strict=True)))

    def take(self) -> Awaitable[Sequence[TextDelta]]:
        """Waits for the next deltas, at least one; () at the end. Choice c of prompt p is p * n + c.

        Raises EyasError when a generation fails.
        """
        return self._streams[0].take() if len(self._streams) == 1 else self._take_any()

    def use_lanes(self, events: EventFormat, meter: CallMeter, parts: BodyParts) -> None:
        """From now on, writes most tokens to `parts` as events, instead of returning their deltas by
        `take`.
        """
        if len(self._streams) == 1:
            (text,) = self._streams
            text.use_lanes(partial(lane_of, text, events, meter, parts))

    def leave_lanes(self) -> None:
        """Ends the lanes: all further deltas are returned by `take`."""
        for text in self._streams:
            text.use_lanes(None)

    async def aclose(self) -> None:
        """Cancels the pending reads. The caller still owns the streams."""
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)

    async def _take_any(self) -> Sequence[TextDelta]:
        deltas: list[TextDelta] = []
        while self._reads and not deltas:
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                prompt = self._reads.pop(task)
                if came := task.result():
                    self._read(prompt)
                base = prompt * self._n
                deltas += [msgspec.structs.replace(delta, choice=base + delta.choice) for delta in came]
        return deltas

    def _read(self, prompt: int) -> None:
        self._reads[asyncio.ensure_future(self._streams[prompt].take())] = prompt


@contextlib.asynccontextmanager
async def admitted(
    backend: GenerationBackend, tokenizer: Tokenizer, call: ApiCall
) -> AsyncIterator[CallAnswer]:
    """Submits all prompts together and yields the answer once all are admitted; closes every generation at
    exit.

    If one prompt is refused, the others are cancelled and its error is raised.
    """
    if len(call.requests) > 1:
        backend.check(call.requests)
    async with contextlib.AsyncExitStack() as owned:

        async def start(request: GenerationRequest) -> TextStream:
            stream = await backend.start(request)
            owned.push_async_callback(stream.aclose)
            return TextStream(stream, request, tokenizer, call.rules)

        try:
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(start(request)) for request in call.requests]
        except ExceptionGroup as refused:
            raise call.named(refused.exceptions[0]) from None
        answer = CallAnswer([task.result() for task in starts], call.n)
        owned.push_async_callback(answer.aclose)
        try:
            yield answer
        except InvalidRequest as error:  # of a worker, as for a grammar that is too slow to follow
            raise call.named(error) from None


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Joins the deltas of one choice, in order and at least one, into a single delta."""
    return TextDelta(
        choice=deltas[0].choice,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(scored for delta in deltas for scored in delta.logprobs),
        offsets=tuple(offset for delta in deltas for offset in delta.offsets),
        finish=deltas[-1].finish,
        accepted=sum(delta.accepted for delta in deltas),
        offered=sum(delta.offered for delta in deltas),
        verify_steps=sum(delta.verify_steps for delta in deltas),
        matched=deltas[-1].matched,
    )


class EventFormat(Protocol):
    """Writes the deltas of one answer as events.

    `text_event`: writes the event of a delta that has only text; None if the event depends on more than the
    text, or if such a delta need not have exactly one event.
    """

    text_event: TextEvent | None

    def event(self, delta: TextDelta) -> bytes:
        """The events of one delta; empty if it has nothing to show yet."""
        ...


def around(event: TextEvent, choice: int) -> tuple[bytes, bytes]:
    """Returns the bytes before and after the text (JSON) in each event of a choice."""
    before, _, after = event(choice, _MARK).partition(_encode(_MARK))
    return before, after


def lane_of(
    text: TextStream, events: EventFormat, meter: CallMeter, parts: BodyParts, choice: int
) -> FastPath | None:
    """Makes the lane of a choice of this response; None: it can have none yet."""
    show = text.bare(choice)
    if show is None:
        return None
    rhythm, event = meter.rhythm(choice), events.text_event
    if event is None:
        return DeltaLane(show, text.usage, rhythm, events, parts)
    return TextLane(show, text.usage, rhythm, around(event, choice), parts)


class EntryLane(FastPath):
    """The lane of one choice: writes its entries as events."""

    __slots__ = ("_parts", "_rhythm", "_show", "_usage")

    def __init__(self, show: Detokenizer, usage: UsageCounts, rhythm: TokenRhythm, parts: BodyParts) -> None:
        """`show` converts the next tokens to text."""
        self._show = show
        self._usage = usage
        self._rhythm = rhythm
        self._parts = parts

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Writes an entry. False, without any effect, if the reader must process it."""
        if entry.finish is not None or entry.logprobs or self._parts.blocked:
            return False
        if entry.timings is not None or entry.prompt is not None:
            return False
        self._rhythm.tokens(len(entry.tokens), now)
        if event := self._event(entry):
            self._parts.write(event)
        return True

    @abstractmethod
    def _event(self, entry: TokenEntry) -> bytes:
        """Counts an entry and returns its event; empty if it has none."""


class TextLane(EntryLane):
    """A lane whose events are constant but for the text, so that their other bytes are rendered once.

    The tokens of all other streams pass between two of its own, so its memory is never in the CPU's cache. It
    therefore touches little per token and shares what it can with other lanes.
    """

    __slots__ = ("_after", "_before")

    def __init__(
        self,
        show: Detokenizer,
        usage: UsageCounts,
        rhythm: TokenRhythm,
        around: tuple[bytes, bytes],
        parts: BodyParts,
    ) -> None:
        """`around`: the bytes before and after the text in an event."""
        super().__init__(show, usage, rhythm, parts)
        self._before, self._after = around[0], _shared(around[1])

    def _event(self, entry: TokenEntry) -> bytes:
        tokens = entry.tokens
        text = self._show.alone[tokens[0]] if len(tokens) == 1 else None
        if text is None:
            text = self._show.feed(tokens)
        self._usage.completion_tokens += len(tokens)
        if entry.offered:
            self._usage.drafted(entry.accepted, entry.offered, 1)
        return self._before + _encode(text) + self._after if text else b""


@lru_cache(256)
def _shared(after: bytes) -> bytes:
    """Returns one shared copy of the bytes for all streams whose events end alike."""
    return after


class DeltaLane(EntryLane):
    """A lane that renders each event in full, as the reader would: its events have more than the text."""

    __slots__ = ("_events",)

    def __init__(
        self,
        show: Detokenizer,
        usage: UsageCounts,
        rhythm: TokenRhythm,
        events: EventFormat,
        parts: BodyParts,
    ) -> None:
        super().__init__(show, usage, rhythm, parts)
        self._events = events

    def _event(self, entry: TokenEntry) -> bytes:
        delta = TextDelta(
            choice=entry.choice,
            text=self._show.feed(entry.tokens),
            tokens=entry.tokens,
            accepted=entry.accepted,
            offered=entry.offered,
            verify_steps=int(entry.offered > 0),
        )
        self._usage.add(delta)
        return self._events.event(delta)


class BodyParts(Protocol):
    """Writes parts of a response body that has begun, bypassing the layers of calls around `send`."""

    __slots__ = ()

    blocked: bool
    """Whether the client reads slowly; checked for every token."""

    def write(self, part: bytes) -> None:
        """Queues a part, which is sent soon. A no-op once the client has disconnected."""
        ...

    def flush(self) -> None:
        """Sends all queued parts now; called before anything else is sent."""
        ...

    async def drain(self) -> None:
        """Waits until the client has read the parts, or has disconnected."""
        ...
