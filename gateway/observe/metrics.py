"""The figures of a gateway: its fronts' counters, and the page of them, by vLLM's names as well.

`docs/metrics.md` lists the metrics. The registry stays its creator's. All figures are read from it when a
page is asked for. Workers export nothing by vLLM's names, so that no figure is counted twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eyas.common.errors import EyasError
from eyas.common.metrics import ModelName, PlainHistogram
from eyas.common.types import FinishCause, WorkerInfo
from gateway.http.siblings import METRICS, GatewaySiblings
from gateway.observe.adapters import AdapterMetrics
from gateway.observe.recent import GatewayTimeline, RecentRequests
from gateway.observe.timings import pulls
from gateway.observe.tracing import RequestTracer, current
from gateway.text.entries import RequestTrace, TextDelta, UsageCounts

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_SYNTHETIC = "1 while drafts are accepted by chance (benchmarks)"
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
PEERS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
"""The figures of each worker that computes the model, by its address in the label `engine`."""


class PlacementMetrics:
    """The decisions of the auto layout, and the accuracy of its predictions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter(
            "eyas_placements",
            "Requests of the auto layout: prompt and answer together, apart, or by_roles (nothing predicted)",
            ["placement"],
            registry=registry,
        )
        self.preference = Gauge(
            "eyas_worker_preference",
            "1 for what the auto layout gives a worker: any, prefill, decode",
            ["worker", "preference"],
            registry=registry,
        )
        self.pace = Gauge(
            "eyas_step_pace",
            "Time of late of steps that decode, compute prompts, or both (mixed), over that at start",
            ["kind"],
            registry=registry,
        )
        self.ttft_ratio = Histogram(
            "eyas_ttft_to_predicted",
            "Time to first token over the prediction of the auto layout",
            ["placement"],
            buckets=_RATIOS,
            registry=registry,
        )
        self.tpot_ratio = Histogram(
            "eyas_tpot_to_predicted",
            "Time per later token over the prediction of the auto layout",
            ["placement"],
            buckets=_RATIOS,
            registry=registry,
        )


class StageMetrics:
    """The waiting times of calls by stage, and the pages that moved for them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "eyas_request_stage_seconds",
            "What a call waited for: queue, prefill, transfer, first_decode",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._link_bytes = Counter(
            "eyas_link_bytes",
            "KV bytes pulled for prompts, per pair of workers and path",
            ["source", "target", "path"],
            registry=registry,
        )

    def add(self, trace: RequestTrace) -> None:
        """Counts a request that has ended."""
        for leg in trace.legs:
            if leg.prefill_ms:
                self._seconds.labels("queue").observe(leg.queue_ms / 1e3)
                self._seconds.labels("prefill").observe(leg.prefill_ms / 1e3)
            if leg.transfer_path:
                self._seconds.labels("transfer").observe(leg.transfer_ms / 1e3)
        if trace.second:
            self._seconds.labels("first_decode").observe(trace.second - trace.first)
        for source, leg in pulls(trace):
            self._link_bytes.labels(source, leg.worker, leg.transfer_path).inc(leg.transfer_bytes)


class SizeMetrics:
    """How long prompts and answers are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._prompt, self._answer = (
            Histogram(f"eyas_request_{name}_tokens", help, buckets=_COUNTS, registry=registry)
            for name, help in (
                ("prompt", "Tokens of one call's prompts"),
                ("generation", "Tokens of one call's answers"),
            )
        )

    def add(self, usage: UsageCounts) -> None:
        """Counts a call that has ended."""
        self._prompt.observe(usage.prompt_tokens)
        self._answer.observe(usage.completion_tokens)


class TurnMetrics:
    """The requests that wait for their turn at the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Gauge(
            "eyas_turn_requests",
            "Requests that wait for their turn at the event loop",
            registry=registry,
        )
        self._bytes = Gauge("eyas_turn_bytes", "Their bytes, 32 KiB of each at least", registry=registry)

    def ask(self, waiting: Callable[[], tuple[int, int]]) -> None:
        """`waiting` is asked for (requests, bytes) whenever the figures are read."""
        self._requests.set_function(lambda: waiting()[0])
        self._bytes.set_function(lambda: waiting()[1])


class GatewayMetrics:
    """The metrics of one gateway process. Canary requests count in `canary_runs` alone.

    A context manager around the time in which its `siblings`, the gateway's other processes if it has any,
    may ask for them.
    """

    tracer: RequestTracer | None = None  # takes the spans of calls; its owner sets it
    exported: Collector  # what the page shows of the registry; the HTTP front names the model there

    def __init__(self, registry: CollectorRegistry, siblings: GatewaySiblings | None = None) -> None:
        self.registry = self.exported = registry
        self.siblings = siblings
        self.serving = Gauge("eyas_serving", "1 while /health answers 200", registry=registry)
        self.synthetic = Gauge("eyas_synthetic_acceptance", _SYNTHETIC, registry=registry)
        self.canary_runs = Counter(
            "eyas_canary_runs",
            "Canary requests: ok, degraded, refused, waited (it stood in a queue, and real requests got "
            "tokens), failed",
            ["outcome"],
            registry=registry,
        )
        labels = ["path", "status"]
        self.responses = Counter("eyas_http_responses", "HTTP responses begun", labels, registry=registry)
        text = "Calls admitted and not yet answered"
        self.running = Gauge("eyas_requests_running", text, registry=registry)
        self.finished = Counter(
            "eyas_request_finished", "Choices by finish reason", ["reason"], registry=registry
        )
        self.first_token = Histogram(
            "eyas_time_to_first_token_seconds",
            "From the parsed request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = PlainHistogram(
            "eyas_inter_token_latency_seconds",
            "Between two deliveries to a choice, divided by the tokens of the later one",
            _TOKEN_SECONDS,
            registry,
        )
        self.request_seconds = Histogram(
            "eyas_e2e_request_latency_seconds",
            "From the parsed request to the end of its answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter("eyas_prompt_tokens", "Tokens of prompts", registry=registry)
        self.generation_tokens = Counter("eyas_generation_tokens", "Tokens generated", registry=registry)
        text = "Prompt tokens found in a prefix cache"
        self.cached_tokens = Counter("eyas_cached_prompt_tokens", text, registry=registry)
        self.accepted = Counter("eyas_draft_tokens_accepted", "Draft tokens accepted", registry=registry)
        self.offered = Counter(
            "eyas_draft_tokens_offered", "Draft tokens offered, in depth", registry=registry
        )
        self.verify_steps = Counter("eyas_verify_steps", "Steps that verified drafts", registry=registry)
        self.acceptance = Histogram(
            "eyas_acceptance_length",
            "Tokens per verify step of one call, its own included",
            buckets=_LENGTHS,
            registry=registry,
        )
        self.stages = StageMetrics(registry)
        self.sizes = SizeMetrics(registry)
        self.turns = TurnMetrics(registry)
        self.placement = PlacementMetrics(registry)
        self.adapters = AdapterMetrics(registry)
        self.recent = RecentRequests()
        self.timeline = GatewayTimeline(registry)
        self._sampling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GatewayMetrics:
        if self.siblings is not None:
            self.siblings.on(METRICS, lambda _: generate_latest(self.exported))
            await self.siblings.start()
        else:  # a sample of one process among several would draw a part of what the page's plots show
            self._sampling = asyncio.create_task(self.timeline.run(), name="timeline")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.siblings is not None:
            await self.siblings.aclose()
        if self._sampling is not None:
            self._sampling.cancel()

    async def page(self) -> bytes:
        """Returns its figures in Prometheus' text; beside siblings, those of all of them."""
        return generate_latest(self.exported) if self.siblings is None else await self.siblings.page()

    def meter(self) -> CallMeter:
        """A meter for one call."""
        return CallMeter(self)


class TokenRhythm:
    """The rhythm of one choice's tokens. `last`: when its last tokens came, monotonic seconds; 0 before.

    `observe` counts the seconds per token that they took.
    """

    __slots__ = ("last", "observe")

    def __init__(self, seconds: PlainHistogram) -> None:
        self.observe = seconds.observe
        self.last = 0.0

    def tokens(self, count: int, now: float) -> None:
        """Counts tokens that came now."""
        last = self.last
        if last:
            self.observe((now - last) / count)
        self.last = now


class CallMeter:
    """Measures one call. A context manager around everything after the request is parsed."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._start = 0.0
        self._rhythms: dict[int, TokenRhythm] = {}  # by choice
        self._finishes: list[FinishCause] = []

    def __enter__(self) -> CallMeter:
        self._metrics.running.inc()
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.running.dec()
        self._metrics.request_seconds.observe(time.monotonic() - self._start)

    def deltas(self, deltas: Sequence[TextDelta]) -> None:
        """Counts deltas that arrive now."""
        for delta in deltas:
            if delta.tokens:
                self.tokens(delta.choice, len(delta.tokens))
            if delta.finish is not None:
                self._metrics.finished.labels(delta.finish).inc()
                self._finishes.append(delta.finish)

    def tokens(self, choice: int, count: int) -> None:
        """Counts tokens of a choice that arrive now."""
        now = time.monotonic()
        if not self._rhythms:
            self._metrics.first_token.observe(now - self._start)
        self.rhythm(choice).tokens(count, now)

    def rhythm(self, choice: int) -> TokenRhythm:
        """Returns the counter of a choice's tokens, for a call that has had some."""
        if choice not in self._rhythms:
            self._rhythms[choice] = TokenRhythm(self._metrics.inter_token)
        return self._rhythms[choice]

    def failed(self, error: EyasError) -> None:
        """Keeps that the call failed after its answer had begun."""
        self._metrics.timeline.failed("a stream", error.http_status, error)

    def ended(self, usage: UsageCounts, traces: Sequence[RequestTrace]) -> None:
        """Counts the whole call; called once, however it ended. `traces`: one per prompt."""
        self._metrics.sizes.add(usage)
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.generation_tokens.inc(usage.completion_tokens)
        self._metrics.accepted.inc(usage.accepted)
        self._metrics.offered.inc(usage.accepted + usage.rejected)
        self._metrics.verify_steps.inc(usage.verify_steps)
        self._metrics.cached_tokens.inc(usage.cached_tokens)
        if usage.acceptance_length is not None:
            self._metrics.acceptance.observe(usage.acceptance_length)
        for trace in traces:
            self._metrics.stages.add(trace)
        self._metrics.recent.add(self._start, self._finishes, usage, traces)
        if (span := current.get()) is not None:
            span.answered(usage, traces)


class RenamedMetric(msgspec.Struct, frozen=True):
    """A figure of ours (without `_total`) under the name that another server has for the same.

    `where`: of the series with these labels alone, which are left out. `label`: (ours, theirs).
    """

    ours: str
    theirs: str
    where: tuple[tuple[str, str], ...] = ()
    label: tuple[str, str] = ("", "")

    def of(self, family: Metric) -> Metric:
        """The figure by its other name."""
        renamed = Metric(self.theirs, family.documentation, family.type)
        for sample in family.samples:
            if all(sample.labels.get(name) == value for name, value in self.where):
                left = {name for name, _ in self.where}
                labels = {
                    self._label(name): value for name, value in sample.labels.items() if name not in left
                }
                renamed.add_sample(sample.name.replace(self.ours, self.theirs, 1), labels, sample.value)
        return renamed

    def _label(self, name: str) -> str:
        return self.label[1] if name == self.label[0] else name


def _stage(stage: str, theirs: str) -> RenamedMetric:
    return RenamedMetric("eyas_request_stage_seconds", theirs, (("stage", stage),))


VLLM = (
    RenamedMetric("eyas_prompt_tokens", "vllm:prompt_tokens"),
    RenamedMetric("eyas_generation_tokens", "vllm:generation_tokens"),
    RenamedMetric("eyas_request_prompt_tokens", "vllm:request_prompt_tokens"),
    RenamedMetric("eyas_request_generation_tokens", "vllm:request_generation_tokens"),
    RenamedMetric("eyas_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    RenamedMetric("eyas_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    RenamedMetric("eyas_inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    RenamedMetric("eyas_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    _stage("queue", "vllm:request_queue_time_seconds"),
    _stage("prefill", "vllm:request_prefill_time_seconds"),
    RenamedMetric("eyas_request_finished", "vllm:request_success", label=("reason", "finished_reason")),
    RenamedMetric("eyas_prompt_tokens", "vllm:prefix_cache_queries"),
    RenamedMetric("eyas_cached_prompt_tokens", "vllm:prefix_cache_hits"),
    RenamedMetric("eyas_verify_steps", "vllm:spec_decode_num_drafts"),
    RenamedMetric("eyas_draft_tokens_offered", "vllm:spec_decode_num_draft_tokens"),
    RenamedMetric("eyas_draft_tokens_accepted", "vllm:spec_decode_num_accepted_tokens"),
)
"""docs/metrics.md has them as a table."""


class VllmNames(Collector):
    """The figures by vLLM's names. `workers`: the workers that are present now."""

    def __init__(self, figures: Collector, workers: Callable[[], Iterable[WorkerInfo]]) -> None:
        self._figures = figures
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """The figures of now."""
        known = {family.name: family for family in self._figures.collect()}
        yield from self._of_workers()
        for renamed in VLLM:
            yield renamed.of(known[renamed.ours])

    def _of_workers(self) -> Iterator[Metric]:
        texts = ("Sequences in the step", "Sequences queued", *["Share of the KV pages in use, 0 to 1"] * 2)
        families = [
            GaugeMetricFamily(name, text, labels=["engine"]) for name, text in zip(PEERS, texts, strict=True)
        ]
        for info in self._workers():
            if info.runs_target:
                used = info.pages_used / info.pages_total if info.pages_total else 0.0
                for family, value in zip(families, (info.running, info.waiting, used, used), strict=True):
                    family.add_metric([info.worker], value)
        return iter(families)


class GatewayPage(Collector):
    """All that a gateway's page shows. `vllm`: the other names too."""

    def __init__(
        self, figures: Collector, model: str, workers: Callable[[], Iterable[WorkerInfo]], *, vllm: bool
    ) -> None:
        parts = [figures, VllmNames(figures, workers)] if vllm else [figures]
        self._parts = [ModelName(part, lambda: model) for part in parts]

    def collect(self) -> Iterator[Metric]:
        """The figures of now."""
        for part in self._parts:
            yield from part.collect()
