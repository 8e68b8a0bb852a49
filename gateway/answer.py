"""The running half of a call: admit every prompt, then one stream of deltas over all of its choices.

It knows several generations at once and who must be closed when one fails. It refuses to know formats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec

from eyas.common.types import GenerationRequest
from gateway.backend import Backend
from gateway.openai_request import Call
from gateway.text import Delta, RequestTrace, TextStream, Usage
from gateway.tokenizer import Tokenizer


class Answer:
    """The admitted generations of one call."""

    def __init__(self, streams: Sequence[TextStream], n: int) -> None:
        self._streams = streams
        self._n = n

    @property
    def traces(self) -> list[RequestTrace]:
        """What has happened to each prompt so far."""
        return [stream.trace for stream in self._streams]

    @property
    def usage(self) -> Usage:
        """The sum over the prompts, so far."""
        counts = [msgspec.structs.astuple(stream.usage) for stream in self._streams]
        return Usage(*map(sum, zip(*counts, strict=True)))

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every delta, `choice` counted over the whole call. Raises EyasError when a generation fails."""
        if len(self._streams) == 1:
            return self._streams[0].deltas()
        return _merged(self._streams, self._n)


@contextlib.asynccontextmanager
async def admitted(backend: Backend, tokenizer: Tokenizer, call: Call) -> AsyncIterator[Answer]:
    """The call's answer once all of its prompts are admitted; closes every generation at the end.

    They ask together. Raises what `Backend.start` raises for the first one that is refused; the others are
    then cancelled.
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
            raise refused.exceptions[0] from None
        yield Answer([task.result() for task in starts], call.n)


async def _merged(streams: Sequence[TextStream], n: int) -> AsyncGenerator[Delta, None]:
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


async def _next(source: AsyncIterator[Delta]) -> Delta | None:
    return await anext(source, None)


def joined(deltas: Sequence[Delta]) -> Delta:
    """One choice's deltas, in order and at least one, as a single delta."""
    return Delta(
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
