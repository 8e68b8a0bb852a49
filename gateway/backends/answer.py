"""Runs a call: admits every prompt, then gives one stream of deltas over all of its choices.

All generations of a call are closed when one fails.

Most tokens take a short way, from a worker's message to the client's connection, without waking a task. An
entry that only adds tokens to a choice is shown at once, by one chain of calls, while the stream's reader
waits. All other entries go through the reader (`TextStream.take`, `Format.event`, `Reply.write`), and so does
everything while the client reads slowly. That way says what is right: on the short one the same bytes leave
sooner. What an HTTP server offers for it, past the layers of calls around ASGI's `send`, is `BodyParts`.
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
"""(choice, text): the event that adds text to a choice and says nothing else."""
_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a text that stands for any other: nothing else in an event is like it
PARTS = "eyas.parts"
"""An extension of ASGI: under this name, a scope may have the `BodyParts` of its response."""


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
        """The metadata of answers about their weights, once these have changed: {} before. Prompts of one
        call may be answered by different ones: then all are named.
        """
        versions = dict.fromkeys(self.weight_versions)
        return {} if [*versions] == [FIRST_VERSION] else {"weight_version": ",".join(versions)}

    @property
    def usage(self) -> UsageCounts:
        """The sum over the prompts so far."""
        counts = [msgspec.structs.astuple(stream.usage) for stream in self._streams]
        return UsageCounts(*map(sum, zip(*counts, strict=True)))

    def take(self) -> Awaitable[Sequence[TextDelta]]:
        """The deltas that have come, at least one; () at the end. Choice c of prompt p is p * n + c.

        Raises EyasError when a generation fails.
        """
        return self._streams[0].take() if len(self._streams) == 1 else self._take_any()

    def use_lanes(self, events: EventFormat, meter: CallMeter, parts: BodyParts) -> None:
        """Sends the events of most tokens to `parts` from now on, instead of their deltas to `take`."""
        if len(self._streams) == 1:
            (text,) = self._streams
            text.use_lanes(partial(lane_of, text, events, meter, parts))

    def leave_lanes(self) -> None:
        """Ends the lanes: nothing is written any more without `take`."""
        for text in self._streams:
            text.use_lanes(None)

    async def aclose(self) -> None:
        """Ends what still reads. The streams stay their owner's."""
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
    """The call's answer once all of its prompts are admitted; closes every generation at the end.

    All prompts are submitted at once. If one is refused the others are cancelled, and its error is raised.
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
        except InvalidRequest as error:  # a worker's: its grammar is too slow to follow, say
            raise call.named(error) from None


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """One choice's deltas, in order and at least one, as a single delta."""
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
    """How one answer is written.

    `text_event`: writes the event of a delta that holds text alone; None if events say more, or if such
    deltas have no event of their own.
    """

    text_event: TextEvent | None

    def event(self, delta: TextDelta) -> bytes:
        """The events of one delta; empty if it holds nothing to show yet."""
        ...


def around(event: TextEvent, choice: int) -> tuple[bytes, bytes]:
    """Returns the bytes before and after the text (JSON) in each event of a choice."""
    before, _, after = event(choice, _MARK).partition(_encode(_MARK))
    return before, after


def lane_of(
    text: TextStream, events: EventFormat, meter: CallMeter, parts: BodyParts, choice: int
) -> FastPath | None:
    """The lane of a choice of this response; None: it has none yet."""
    show = text.bare(choice)
    if show is None:
        return None
    rhythm, event = meter.rhythm(choice), events.text_event
    if event is None:
        return DeltaLane(show, text.usage, rhythm, events, parts)
    return TextLane(show, text.usage, rhythm, around(event, choice), parts)


class EntryLane(FastPath):
    """The lane of one choice."""

    __slots__ = ("_parts", "_rhythm", "_show", "_usage")

    def __init__(self, show: Detokenizer, usage: UsageCounts, rhythm: TokenRhythm, parts: BodyParts) -> None:
        """`show`: the text of the next tokens."""
        self._show = show
        self._usage = usage
        self._rhythm = rhythm
        self._parts = parts

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Shows an entry; False, and nothing has happened: it is the reader's."""
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
        """The event of an entry, which it counts; empty if there is none."""


class TextLane(EntryLane):
    """All bytes of its events but the text's are rendered once.

    Between two of its tokens those of all other streams pass, so what it touches is in no cache: it has at
    hand what most tokens need, and shares what it can.
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
        """`around`: what is before and after the text in an event."""
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
    """The same bytes, in one place for all streams whose events end alike."""
    return after


class DeltaLane(EntryLane):
    """A lane whose events are rendered as the reader would: they say more than the text."""

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
    """The short way for parts of a body that has begun: past the layers of calls around `send`."""

    __slots__ = ()

    blocked: bool
    """Whether the client reads slowly. It is read for every token."""

    def write(self, part: bytes) -> None:
        """Takes a part, which leaves soon. A no-op once the client is gone."""
        ...

    def flush(self) -> None:
        """All parts leave now: before anything else is sent."""
        ...

    async def drain(self) -> None:
        """Waits until the client has read, or is gone."""
        ...
