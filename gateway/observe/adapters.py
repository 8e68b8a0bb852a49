"""Figures of adapters: how much each is asked for. Names come from callers, so labels are bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from eyas.common.types import GenerationRequest
from gateway.backends.base import GenerationBackend, GenerationStream, PassingBackend, WatchedStream

MOST_LABELS = 100
OTHERS = "others"
"""The label of all adapters that came after so many: of a process, names are never forgotten."""


class AdapterMetrics:
    """The requests and tokens of each adapter, by its name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "eyas_adapter_requests", "Requests by adapter", ["adapter"], registry=registry
        )
        self._tokens = Counter(
            "eyas_adapter_generation_tokens", "Tokens generated, by adapter", ["adapter"], registry=registry
        )
        self.loaded = Gauge("eyas_adapters", "Adapters that requests may have", registry=registry)
        self._labels: set[str] = set()

    def count_request(self, name: str) -> str:
        """Counts a request; the label of its adapter."""
        known = name in self._labels or len(self._labels) < MOST_LABELS
        label = name if known else OTHERS
        self._labels |= {name} if known else set()
        self._requests.labels(label).inc()
        return label

    def count_tokens(self, label: str, tokens: int) -> None:
        """Counts the tokens of a request that has ended."""
        self._tokens.labels(label).inc(tokens)


class AdapterMeter(PassingBackend):
    """Passes everything to the backend behind it, and counts the requests that an adapter computes."""

    def __init__(self, backend: GenerationBackend, metrics: AdapterMetrics) -> None:
        super().__init__(backend)
        self._metrics = metrics
        metrics.loaded.set_function(lambda: len(backend.adapters.roster.adapters))

    async def start(self, request: GenerationRequest) -> GenerationStream:
        """Starts a request, and counts its tokens once its stream is closed."""
        if not request.adapter:
            return await self._backend.start(request)
        adapters = self._backend.adapters.roster.adapters
        names = (adapter.name for adapter in adapters if adapter.id == request.adapter)
        label = self._metrics.count_request(next(names, request.adapter))  # the id of one that just left
        stream = await self._backend.start(request)
        return WatchedStream(stream, lambda watched: self._metrics.count_tokens(label, watched.tokens))
