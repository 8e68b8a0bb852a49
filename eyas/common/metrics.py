"""Prometheus figures of a worker, names `eyas_*`: who counts calls a method; nobody else names a metric."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from eyas.common.types import Entry


class WorkerMetrics:
    """The figures of one worker in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"eyas_{name}", help, registry=registry)

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"eyas_{name}", help, labels, registry=registry)

        self.serving = gauge("serving", "1 while health says SERVING")
        self.running = gauge("requests_running", "Sequences in the step")
        self.waiting = gauge("requests_waiting", "Sequences queued")
        self.pages_used = gauge("kv_pages_used", "KV pages in use")
        self.pages = gauge("kv_pages", "KV pages of the pool")
        self._engine_totals = {
            "prompt_tokens": counter("prompt_tokens", "Prompt tokens of admitted requests"),
            "cached_tokens": counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache"),
            "preemptions": counter("preemptions", "Sequences sent back to the queue"),
        }
        self._seen = dict.fromkeys(self._engine_totals, 0)
        self._tokens = counter("generation_tokens", "Tokens given to requests")
        self._accepted = counter("draft_tokens_accepted", "Draft tokens kept by verification")
        self._offered = counter("draft_tokens_offered", "Draft tokens offered to verification, in depth")
        self._rounds = counter("verify_steps", "Steps that verified a proposal, per sequence")
        self._moved = counter("transfer_bytes", "KV bytes pulled", ("path",))

    def totals(self, **totals: int) -> None:
        """The engine's own running totals: prompt_tokens, cached_tokens, preemptions."""
        for name, total in totals.items():
            self._engine_totals[name].inc(max(0, total - self._seen[name]))
            self._seen[name] = total

    def step(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._tokens.inc(len(entry.tokens))
            if entry.offered:
                self._rounds.inc()
                self._accepted.inc(entry.accepted)
                self._offered.inc(entry.offered)
            if entry.timings is not None and entry.timings.transfer_bytes:
                self._moved.labels(entry.timings.transfer_path).inc(entry.timings.transfer_bytes)
