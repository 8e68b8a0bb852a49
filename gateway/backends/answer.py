"""Runs a call: admits every prompt, then gives one stream of deltas over all of its choices.

All generations of a call are closed when one fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.types import GenerationRequest
from gateway.backends.base import GenerationBackend
from gateway.backends.lane import EventFormat, lane_of
from gateway.formats.openai_request import ApiCall
from gateway.http.parts import BodyParts
from gateway.observe.metrics import CallMeter
from gateway.text.entries import RequestTrace, TextDelta, TextStream, UsageCounts
from gateway.text.tokenizer import Tokenizer


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
