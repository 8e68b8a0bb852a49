"""The Prometheus metrics of a worker. Only this module knows their names.

`docs/metrics.md` lists the metrics of every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from eyas.common.histogram import STEP_SECONDS, STEP_SEQUENCES, Histogram
from eyas.common.types import TokenEntry


class PlainHistogram(Collector):
    """A histogram without labels and locks, for one thread, which is cheap enough to observe every token.

    `observe` adds one value. Consecutive equal values are counted together, because streams in the same step
    observe the same time between tokens. `show` replaces all values by the counts of another process.
    """

    def __init__(
        self, name: str, help: str, bounds: tuple[float, ...], registry: CollectorRegistry | None = None
    ) -> None:
        self._name = name
        self._help = help
        self._bounds = tuple(map(float, bounds))
        self._values = Histogram(self._bounds)
        self._value, self._times = 0.0, 0  # the last value and its repetitions, not yet counted
        if registry is not None:
            registry.register(self)

    def observe(self, value: float) -> None:
        """Adds a value."""
        if value != self._value:
            self._flush()
            self._value = value
        self._times += 1

    def show(self, counts: Sequence[int], total: float) -> None:
        """Replaces the values by `counts` per bucket, as in `eyas.common.histogram.Histogram`, unless
        empty.
        """
        if counts:
            self._values.counts[:] = counts
            self._values.total = total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The counts so far, as Prometheus reads them."""
        self._flush()
        names = (*map(str, self._bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._values.counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._values.total)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Describes its name and help to the registry."""
        yield HistogramMetricFamily(self._name, self._help)

    def _flush(self) -> None:
        if self._times:
            self._values.add(self._value, self._times)
            self._times = 0


class ModelName(Collector):
    """Adds the label `model_name` to the metrics of `figures`, except those of the process itself.

    `model`: returns the model's name; empty (not known yet): no label is added.
    """

    OF_THE_PROCESS = ("process_", "python_")

    def __init__(self, figures: Collector, model: Callable[[], str]) -> None:
        self._figures = figures
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        name = self._model()
        for family in self._figures.collect():
            if not name or family.name.startswith(self.OF_THE_PROCESS):
                yield family
                continue
            named = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                named.add_sample(sample.name, {**sample.labels, "model_name": name}, sample.value)
            yield named

    def describe(self) -> Iterator[Metric]:
        """Names and help of all of them, for a registry."""
        yield from self._figures.collect()


_TOTALS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests"),
    "cached_tokens": ("cached_prompt_tokens", "Prompt tokens found in the prefix cache"),
    "preemptions": ("preemptions", "Sequences sent back to the queue"),
    "logits_not_finite": (
        "logits_not_finite",
        "Requests that failed because their logits were NaN or infinite",
    ),
    "pulls_failed": ("transfer_failures", "Pulls that ended without their pages"),
    "nodes_verified": ("draft_nodes_verified", "Draft tokens verified, on all branches"),
    "drafts_late": ("draft_rounds_late", "Rounds that did not wait for their draft"),
    "store_tokens": ("store_tokens", "Prompt tokens whose KV a disk or a shared store gave"),
    "store_misses": ("store_misses", "Looks for KV there that met a page it lacks"),
    "store_bytes_out": ("store_bytes_out", "KV bytes written to a disk or a shared store"),
    "store_bytes_in": ("store_bytes_in", "KV bytes read from there"),
    "store_failures": ("store_failures", "Calls that a disk or a shared store failed"),
    "store_slow": ("store_slow", "Prompts computed because that was faster than their KV from there"),
    "host_tokens": ("host_cache_tokens", "Prompt tokens whose KV came back from the host"),
    "host_bytes_out": ("host_cache_bytes_out", "KV bytes copied to the host"),
    "host_bytes_in": ("host_cache_bytes_in", "KV bytes copied back from the host"),
    "adapter_loads": ("adapter_loads", "Adapters copied from the host's memory to the device"),
    "adapter_seconds": ("adapter_load_seconds", "From the begin of such a copy to its end"),
    "state_hits": ("state_cache_hits", "Sequences that resumed from a cached state"),
    "state_tokens": ("state_cache_tokens", "Prompt tokens before the states resumed from"),
    "state_missed": (
        "state_cache_missed_tokens",
        "Prompt tokens with cached pages, computed for want of a state",
    ),
}
"""The counters of an engine, by their name in `WorkerMetrics.totals`: the metric's name and help."""


class WorkerMetrics:
    """The metrics of one worker, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"eyas_{name}", help, registry=registry)

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"eyas_{name}", help, labels, registry=registry)

        self.serving = gauge("serving", "1 while health says SERVING")
        self.paused = gauge("paused", "1 while no step runs, and requests wait")
        self.asleep = gauge("asleep", "1 while weights or KV have left their memory")
        self.synthetic = gauge("synthetic_acceptance", "1 if drafts are accepted by chance (benchmarks)")
        self.running = gauge("requests_running", "Sequences in the step")
        self.waiting = gauge("requests_waiting", "Sequences queued")
        self.queue_age = gauge("queue_age_seconds", "Age of the oldest request that waits for its first work")
        self.pages_used = gauge("kv_pages_used", "KV pages that a sequence, a pull or a lease holds")
        self.pages = gauge("kv_pages", "KV pages of the pool")
        self.host_pages = gauge("host_cache_pages", "KV pages that the host holds")
        self.state_slots = gauge("state_slots", "Slots of recurrent states")
        self.state_slots_used = gauge("state_slots_used", "Slots that a sequence, a pull or a lease holds")
        self.states_cached = gauge("states_cached", "States that the prefix cache keeps")
        self.adapter_slots_used = gauge("adapter_slots_used", "Slots of the device that an adapter has")
        self.adapter_waiting = gauge("adapter_waiting", "Sequences that wait for a slot for their adapter")
        self.adapter_bytes = gauge("adapter_host_bytes", "Bytes of the host's memory that adapters have")
        self.weights_generation = gauge("weights_generation", "Updates of the weights since the start")
        self.weights_pause = gauge("weights_pause_seconds", "How long no step could run for the last of them")
        self.step_seconds = PlainHistogram(
            "eyas_step_seconds", "From the launch of a step to its tokens", STEP_SECONDS, registry
        )
        self.step_sequences = PlainHistogram(
            "eyas_step_sequences", "Sequences per step", STEP_SEQUENCES, registry
        )
        self._engine_totals = {name: counter(*metric) for name, metric in _TOTALS.items()}
        self._seen = dict.fromkeys(self._engine_totals, 0.0)
        self._tokens = counter("generation_tokens", "Tokens given to requests")
        self._accepted = counter("draft_tokens_accepted", "Draft tokens kept by verification")
        self._offered = counter("draft_tokens_offered", "Draft tokens offered to verification, in depth")
        self._rounds = counter("verify_steps", "Steps that verified a proposal, per sequence")
        self.leases = gauge("leases", "Handles that claim pages here for a puller")
        self._moved = (
            counter("transfers", "Pulls that ended with their pages", ("path",)),
            counter("transfer_bytes", "KV bytes pulled", ("path",)),
            counter("transfer_seconds", "From the pages of a pull to their validation", ("path",)),
        )
        self._seen_moved: dict[str, tuple[float, ...]] = {}
        self._ways_refused = counter(
            "transfer_ways_refused",
            "Proofs of a way to a peer's pages, and copies by it, that failed",
            ("path",),
        )
        self._seen_refused: dict[str, int] = {}
        self._commits = counter("draft_commits", "Rounds told to draft workers, by path", ("path",))
        self._seen_commits: dict[str, int] = {}

    def moved(self, path: str, *totals: float) -> None:
        """Updates the counters of one transfer path to the engine's totals: pulls, bytes, seconds."""
        seen = self._seen_moved.get(path, (0.0, 0.0, 0.0))
        for counter, before, total in zip(self._moved, seen, totals, strict=True):
            counter.labels(path).inc(max(0.0, total - before))
        self._seen_moved[path] = totals

    def ways_refused(self, path: str, total: int) -> None:
        """Updates the counter of failures of one transfer path to the engine's total."""
        self._ways_refused.labels(path).inc(max(0, total - self._seen_refused.get(path, 0)))
        self._seen_refused[path] = total

    def drafts_sent(self, path: str, total: int) -> None:
        """Updates the counter of commits to draft workers by one path to the engine's total."""
        self._commits.labels(path).inc(max(0, total - self._seen_commits.get(path, 0)))
        self._seen_commits[path] = total

    def totals(self, **totals: float) -> None:
        """Updates the counters of `_TOTALS` to the engine's totals."""
        for name, total in totals.items():
            self._engine_totals[name].inc(max(0, total - self._seen[name]))
            self._seen[name] = total

    def step(self, entries: Sequence[TokenEntry]) -> None:
        """Counts the tokens and drafts of one `Step` message."""
        self._tokens.inc(sum([len(entry.tokens) for entry in entries]))
        if verified := [entry for entry in entries if entry.offered]:
            self._rounds.inc(len(verified))
            self._accepted.inc(sum(entry.accepted for entry in verified))
            self._offered.inc(sum(entry.offered for entry in verified))
