"""The last quarter of an hour of a gateway, second by second, and the calls that failed.

It reads the totals of the gateway's figures once a second and keeps them: a page that opens later sees what
was before. The memory is bounded. It holds numbers, routes and the words of refusals that quote nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec
from prometheus_client.registry import Collector

from eyas.common.errors import EyasError
from eyas.common.logging import request_id

EVERY_S = 1.0
SAMPLES = 900
FAILURES = 64
FIGURES = frozenset(
    f"eyas_{name}"
    for name in (
        "generation_tokens_total",
        "verify_steps_total",
        "draft_tokens_accepted_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "http_responses_total",
    )
)
"""The figures of the console's plots."""


class TimelineSample(msgspec.Struct, frozen=True, array_like=True):
    """The totals at a moment: seconds since 1970, and a value per series, in the order
    of `GatewayTimeline.series`; a series that came later has none here.
    """

    time: float
    values: list[float]


class CallFailure(msgspec.Struct, frozen=True):
    """A call that failed. `reason`: the server's own words of its own trouble, else empty: what is said of a
    wrong request may quote it.
    """

    time: float
    id: str
    path: str
    status: int
    code: str
    reason: str


class GatewayTimeline:
    """The samples and the failures."""

    def __init__(self, figures: Collector) -> None:
        self._figures = figures
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}  # and their places
        self._samples: deque[TimelineSample] = deque(maxlen=SAMPLES)
        self._failures: deque[CallFailure] = deque(maxlen=FAILURES)

    def sample(self) -> None:
        """Keeps the totals of now."""
        figures: dict[int, float] = {}
        for family in self._figures.collect():
            for sample in family.samples:
                if sample.name in FIGURES:
                    name = sample.name, tuple(sorted(sample.labels.items()))
                    figures[self._series.setdefault(name, len(self._series))] = sample.value
        values = [figures.get(place, 0.0) for place in range(len(self._series))]
        self._samples.append(TimelineSample(round(time.time(), 3), values))

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(EVERY_S)

    def failed(self, path: str, status: int, error: EyasError | None) -> None:
        """Keeps a failure of the call that this code serves. `error`: None: a defect, or no such route."""
        own = error is not None and (status == 429 or status >= 500)
        code, reason = ("", "") if error is None else (error.code, str(error) if own else "")
        self._failures.append(
            CallFailure(round(time.time(), 3), request_id.get(), path, status, code, reason)
        )

    @property
    def failures(self) -> list[CallFailure]:
        """The last ones, newest first."""
        return [*reversed(self._failures)]

    def snapshot(self) -> dict[str, object]:
        """The samples, for the console."""
        series = [{"name": name, "labels": dict(labels)} for name, labels in self._series]
        return {"series": series, "samples": [*self._samples]}
