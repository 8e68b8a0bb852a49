"""Limits of adapters: each holds for all callers of an adapter together, beside the limits of their keys."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from eyas.common.errors import EyasError
from eyas.common.types import GenerationRequest
from gateway.backends.base import GenerationBackend, GenerationStream, PassingBackend, WatchedStream
from gateway.limits.quotas import CallerLimits, QuotaUse, UsageAccounts


class AdapterLimits(PassingBackend):
    """Passes requests within the limits of their adapter to the backend behind it.

    Each prompt counts as a request. Two names of one content are one adapter, with the limits of the first.
    """

    def __init__(
        self,
        backend: GenerationBackend,
        limits: CallerLimits,
        count_limited: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count_limited`: is called with the name of the adapter of a request that is refused."""
        super().__init__(backend)
        self._count_limited = count_limited
        self._limited = bool(limits.adapters)
        self._accounts = UsageAccounts(limits.of_adapter, lambda name: f"the adapter {name}", clock)

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises RateLimited if these are too many of an adapter for now, and InvalidRequest if they always
        are: so a call that cannot begin uses nothing up.
        """
        if self._limited:
            for adapter, count in Counter(request.adapter for request in requests).items():
                if adapter:
                    with self._use(adapter) as use:
                        use.check(count)
        self._backend.check(requests)

    async def start(self, request: GenerationRequest) -> GenerationStream:
        """Starts a request. Raises RateLimited if it is one too many of its adapter."""
        if not (self._limited and request.adapter) or request.params.prompt_experts:
            return await self._backend.start(request)  # experts are asked for within a call that counts
        with self._use(request.adapter) as use:
            use.enter()
        try:
            stream = await self._backend.start(request)
        except BaseException:
            use.leave()
            raise
        use.pay(len(request.prompt_ids))

        def closed(watched: WatchedStream) -> None:
            use.pay(watched.tokens)
            use.leave()

        return WatchedStream(stream, closed)

    @contextlib.contextmanager
    def _use(self, adapter: str) -> Iterator[QuotaUse]:
        """A call on the account of an adapter's name; a refusal here is counted."""
        name = self._backend.adapters.roster.name_of(adapter)
        try:
            yield self._accounts.use(name)
        except EyasError:
            self._count_limited(name)
            raise
