"""Runs a call: admits every prompt, then gives one stream of deltas over all of its choices.

It knows several generations at once, and closes all of them when one fails. It refuses to know formats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec

from eyas.common.types import GenerationRequest
from gateway.backend import GenerationBackend
from gateway.openai_request import ApiCall
from gateway.text import RequestTrace, TextDelta, TextStream, UsageCounts
from gateway.tokenizer import Tokenizer


class Answer:
    """The admitted generations of one call, one per prompt with `n` choices each."""

    def __init__(self, streams: Sequence[TextStream], n: int) -> None:
        self._streams = streams
        self._n = n

    @property
    def traces(self) -> list[RequestTrace]:
        """What has happened to each prompt so far."""
        return [stream.trace for stream in self._streams]

    @property
    def usage(self) -> UsageCounts:
        """The sum over the prompts so far."""
        counts = [msgspec.structs.astuple(stream.usage) for stream in self._streams]
        return UsageCounts(*map(sum, zip(*counts, strict=True)))

    def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Every delta as it comes; choice c of prompt p has number p * n + c.

        Raises EyasError when a generation fails.
        """
        if len(self._streams) == 1:
            return self._streams[0].deltas()
        return _merged(self._streams, self._n)


@contextlib.asynccontextmanager
async def admitted(backend: GenerationBackend, tokenizer: Tokenizer, call: ApiCall) -> AsyncIterator[Answer]:
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
        yield Answer([task.result() for task in starts], call.n)


async def _merged(streams: Sequence[TextStream], n: int) -> AsyncGenerator[TextDelta, None]:
    """The deltas of all streams as they come."""
    sources = [(p * n, stream.deltas()) for p, stream in enumerate(streams)]
    waiting = {asyncio.ensure_future(_next(source)): (base, source) for base, source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                base, source = waiting.pop(task)
                if (delta := task.result()) is None:
                    continue
                waiting[asyncio.ensure_future(_next(source))] = (base, source)
                yield msgspec.structs.replace(delta, choice=base + delta.choice)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(source: AsyncIterator[TextDelta]) -> TextDelta | None:
    return await anext(source, None)


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
