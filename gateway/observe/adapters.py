"""Figures of adapters: how much each is asked for. Names come from callers, so labels are bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from eyas.common.types import GenerationRequest
from gateway.backends.base import GenerationBackend, GenerationStream, PassingBackend, WatchedStream

MOST_LABELS = 100
OTHERS = "others"
"""The label of all adapters beyond the bound: a process never forgets a name."""


class AdapterMetrics:
    """The requests and tokens of each adapter, by its name. `loaded`: how many there are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "eyas_adapter_requests", "Requests by adapter", ["adapter"], registry=registry
        )
        self._prompts = Counter(
            "eyas_adapter_prompt_tokens", "Tokens of prompts, by adapter", ["adapter"], registry=registry
        )
        self._tokens = Counter(
            "eyas_adapter_generation_tokens", "Tokens generated, by adapter", ["adapter"], registry=registry
        )
        self._limited = Counter(
            "eyas_adapter_requests_limited",
            "Requests over a limit of their adapter, which were refused",
            ["adapter"],
            registry=registry,
        )
        self.loaded = Gauge("eyas_adapters", "Adapters that requests may have", registry=registry)
        self._labels: set[str] = set()

    def count_request(self, name: str) -> str:
        """Counts a request; the label of its adapter."""
        label = self._label(name)
        self._requests.labels(label).inc()
        return label

    def count_limited(self, name: str) -> None:
        """Counts a request that was refused for its adapter's limits."""
        self._limited.labels(self._label(name)).inc()

    def count_tokens(self, label: str, prompt: int, made: int) -> None:
        """Counts the tokens of a request that has ended: its prompt's, and those that were made."""
        self._prompts.labels(label).inc(prompt)
        self._tokens.labels(label).inc(made)

    def _label(self, name: str) -> str:
        known = name in self._labels or len(self._labels) < MOST_LABELS
        self._labels |= {name} if known else set()
        return name if known else OTHERS


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
        label = self._metrics.count_request(self._backend.adapters.roster.name_of(request.adapter))
        stream, prompt = await self._backend.start(request), len(request.prompt_ids)
        return WatchedStream(
            stream, lambda watched: self._metrics.count_tokens(label, prompt, watched.tokens)
        )
