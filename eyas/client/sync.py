"""The blocking client: `AsyncClient` run on an event loop in a thread of its own.

What a call does is written once, in `eyas.client.aio`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from eyas.client.aio import (
    CONTROL_S,
    DEFAULT_RETRIES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    AsyncClient,
    AsyncStream,
    is_forked,
    refuse_forked,
)
from eyas.client.types import (
    ChatOptions,
    Completion,
    Delta,
    LoraAdapter,
    MemoryTag,
    Message,
    Model,
    MovedMemory,
    Options,
    PauseMode,
    PromptLogprobs,
    Timings,
    Usage,
    WeightsUpdated,
)
from eyas.client.weights import WeightsSource
from eyas.common.errors import Cancelled, InvalidRequest

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread. Once it is closed, waiting raises `Cancelled`."""

    def __init__(self) -> None:
        refuse_forked()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="eyas-client", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()  # a call is submitted before the close, which ends it, or refused
        self._closed = False

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; an interrupt of the waiting thread cancels it.

        Raises InvalidRequest after a fork, which leaves the loop without its thread.
        """
        try:
            refuse_forked()
        except InvalidRequest:
            coroutine.close()
            raise
        with self._closing:
            if self._closed:
                coroutine.close()
                raise Cancelled("the client is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Cancelled("the client was closed during the call") from None
        except BaseException:
            future.cancel()
            raise

    def run(self, function: Callable[[], T]) -> T:
        """The result of a function that needs the running loop around it."""

        async def call() -> T:
            return function()

        return self.wait(call())

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Ends whatever still waits, in any thread, then runs `last`. Idempotent; nothing after a fork."""
        if is_forked():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await last()


class Stream:
    """The deltas of one running call, in order. Leaving its `with` block cancels the call.

    Iteration raises EyasError if the call fails.
    """

    def __init__(self, portal: LoopThread, stream: AsyncStream) -> None:
        self._portal = portal
        self._stream = stream

    @property
    def request_id(self) -> str:
        """The call's name in the server's logs; empty until the server has admitted the call."""
        return self._stream.request_id

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's log-probabilities, before the first delta, if they were requested."""
        return self._stream.prompt_logprobs

    @property
    def usage(self) -> Usage:
        """All zeros until the call has ended."""
        return self._stream.usage

    @property
    def timings(self) -> Timings:
        """All zeros until the call has ended."""
        return self._stream.timings

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        try:
            return self._portal.wait(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def completion(self) -> Completion:
        """Everything that is still to come, as whole answers."""
        return self._portal.wait(self._stream.completion())

    def close(self) -> None:
        """Cancel the call if it still runs. Idempotent."""
        if is_forked():
            return  # the call is the parent's
        with contextlib.suppress(Cancelled):  # a closed client has no calls
            self._portal.wait(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A client of one Eyas server; `AsyncClient`, which says what each call does, is its twin for asyncio.

    Close it, or use it in a `with` block: calls that still run, and later ones, raise `Cancelled`. Safe to
    share between threads.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        ca: str | None = None,
    ) -> None:
        self._portal = LoopThread()
        try:
            self._client = self._portal.run(
                lambda: AsyncClient(
                    target, api_key=api_key, model=model, timeout_s=timeout_s, retries=retries, ca=ca
                )
            )
        except BaseException:
            self._portal.close(_nothing)
            raise

    def chat(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """The assistant's answer to `messages`, whole."""
        return self._portal.wait(self._client.chat(messages, timeout_s=timeout_s, **options))

    def chat_stream(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """The assistant's answer to `messages` as it is made."""
        return self._stream(lambda: self._client.chat_stream(messages, timeout_s=timeout_s, **options))

    def generate(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The continuation of a text, or of token ids, whole."""
        return self._portal.wait(self._client.generate(prompt, timeout_s=timeout_s, **options))

    def generate_stream(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Stream:
        """The continuation of a text, or of token ids, as it is made."""
        return self._stream(lambda: self._client.generate_stream(prompt, timeout_s=timeout_s, **options))

    def pause_generation(
        self, mode: PauseMode = "abort", *, limit_s: float = 0.0, timeout_s: float = CONTROL_S
    ) -> int:
        """Stops generation; how many requests that ended, or sent back to a queue. `limit_s`: the seconds
        after which generation goes on by itself (0: it does not).
        """
        return self._portal.wait(self._client.pause_generation(mode, limit_s=limit_s, timeout_s=timeout_s))

    def continue_generation(self, *, timeout_s: float = CONTROL_S) -> None:
        """Lets generation go on."""
        self._portal.wait(self._client.continue_generation(timeout_s=timeout_s))

    def release_memory(
        self, tags: Sequence[MemoryTag] = (), *, timeout_s: float = CONTROL_S
    ) -> list[MovedMemory]:
        """Lets memory of all workers go; what has left."""
        return self._portal.wait(self._client.release_memory(tags, timeout_s=timeout_s))

    def resume_memory(
        self, tags: Sequence[MemoryTag] = (), *, timeout_s: float = CONTROL_S
    ) -> list[MovedMemory]:
        """Takes it again; what has come back."""
        return self._portal.wait(self._client.resume_memory(tags, timeout_s=timeout_s))

    def update_weights(
        self,
        source: WeightsSource,
        *,
        version: str = "",
        running: str = "drain",
        wait_s: float = 300.0,
        whole: bool = False,
    ) -> WeightsUpdated:
        """Changes the weights of all workers, or of none; returns when the new ones serve."""
        updating = self._client.update_weights(
            source, version=version, running=running, wait_s=wait_s, whole=whole
        )
        return self._portal.wait(updating)

    def join_weights_group(
        self,
        group: str,
        address: str,
        size: int,
        *,
        backend: str = "nccl",
        first_rank: int = 1,
        timeout_s: float = CONTROL_S,
    ) -> tuple[str, ...]:
        """All workers join a `torch.distributed` group, whose rank 0 listens at `address`."""
        joining = self._client.join_weights_group(
            group, address, size, backend=backend, first_rank=first_rank, timeout_s=timeout_s
        )
        return self._portal.wait(joining)

    def leave_weights_group(self, group: str, *, timeout_s: float = CONTROL_S) -> None:
        """They leave it."""
        self._portal.wait(self._client.leave_weights_group(group, timeout_s=timeout_s))

    def load_adapter(
        self,
        name: str,
        path: str,
        *,
        pinned: bool = False,
        replace: bool = False,
        timeout_s: float = CONTROL_S,
    ) -> LoraAdapter:
        """Loads the LoRA adapter in a folder of the server, on all workers or on none."""
        loading = self._client.load_adapter(name, path, pinned=pinned, replace=replace, timeout_s=timeout_s)
        return self._portal.wait(loading)

    def unload_adapter(self, name: str, *, timeout_s: float = CONTROL_S) -> LoraAdapter:
        """Unloads an adapter; calls that have it go on to their ends."""
        return self._portal.wait(self._client.unload_adapter(name, timeout_s=timeout_s))

    def models(self, *, timeout_s: float = 10.0) -> list[Model]:
        """Returns the models of the server."""
        return self._portal.wait(self._client.models(timeout_s=timeout_s))

    def close(self) -> None:
        """Cancel what still runs, in any thread, and close the connection. Idempotent."""
        self._portal.close(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, start: Callable[[], AsyncStream]) -> Stream:
        return Stream(self._portal, self._portal.run(start))


async def _nothing() -> None:
    """Closes nothing, for a client whose start failed."""
