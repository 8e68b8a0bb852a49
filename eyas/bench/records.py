"""The measurements of one run: a record per request, the run that holds them, and the objectives for them.

Times are the client's, in seconds. Service-level objectives are bounds on a request's latencies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.common.errors import ConfigError

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
KINDS = ("ttft", "tpot", "e2e")


@dataclass
class RequestRecord:
    """One request. `error` is empty if it succeeded; only then do its other fields count.

    A request is due when its arrival time has come or the request before it in the conversation has ended.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    start_s: float = 0.0
    """When it was sent, from the run's zero."""
    waited_s: float = 0.0
    """From when it was due until it was sent: the client's own waiting."""
    ttft_s: float = 0.0
    """From sending to the first chunk that has text; to the end, if none has."""
    latency_s: float = 0.0
    """From sending to the last line of the answer."""
    itls_s: list[float] = field(default_factory=list)
    """Gaps between chunks that have text; per token where a chunk says its number of tokens."""
    accepted: int = 0
    """Drafted tokens that were accepted, where the server's usage says so."""
    rejected: int = 0
    verify_steps: int | None = None
    """Forward passes that verified drafts; None: the server does not say."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in a cache; None: the server does not say."""
    turn: int = 1
    """Its place in its conversation, with the turns that a sub-agent begins behind."""
    phases_ms: dict[str, float] = field(default_factory=dict)
    """Times that the server itself reports, by name."""
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass
class RunRecord:
    """All requests of one run, in the order in which they were due, and what was asked for."""

    settings: dict[str, Any]
    """What was asked, by the names of `eyas.bench.figures`: backend, dataset_name, request_rate ..."""
    seconds: float
    """From the run's zero to the end of its last request."""
    records: list[RequestRecord]
    accept_length: float | None = None
    """Mean tokens per verify step, where the server reports it."""
    server_info: dict[str, Any] | None = None
    client_cpu: float = 0.0
    """CPU seconds of the client per second of the run: 1.0 is a whole core."""
    client_lag_ms: float = 0.0
    """How late the client's event loop was, 99th percentile."""
    complete: bool = True
    """False for a run that was interrupted: `records` are those that had ended."""


@dataclass(frozen=True)
class LatencySlo:
    """Upper bounds in seconds, by kind (ttft, tpot, e2e). Without any, every success is good."""

    bounds_s: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> LatencySlo:
        """Parses text like ttft=200ms,tpot=20ms,e2e=5s. Raises ConfigError."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)(us|ms|s)", part.strip())
            if match is None or match[1] not in KINDS:
                raise ConfigError(
                    f"--slo: {part!r} is not like ttft=200ms (one of {', '.join(KINDS)}; us, ms or s)",
                    param="slo",
                )
            if match[1] in bounds:
                raise ConfigError(f"--slo: {match[1]} is given twice", param="slo")
            bounds[match[1]] = float(match[2]) * UNITS[match[3]]
        return cls(bounds)

    def met(self, record: RequestRecord) -> bool:
        """True if the request succeeded within every bound; a single token has no TPOT to bound."""
        latencies = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.latency_s}
        return not record.error and all(
            latencies[kind] <= self.bounds_s.get(kind, math.inf) for kind in latencies
        )

    def __str__(self) -> str:
        return ",".join(f"{kind}={1e3 * bound:g}ms" for kind, bound in self.bounds_s.items())
