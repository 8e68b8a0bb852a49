"""The figures of a gateway as its page shows them: with the model's name, and by vLLM's names as well.

All figures are read from a registry when a page is asked for. Workers export nothing by those names, so that
no figure is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eyas.common.metrics import ModelName
from eyas.common.types import WorkerInfo

PEERS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
"""The figures of each worker that computes the model, by its address in the label `engine`."""


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
