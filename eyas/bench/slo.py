"""Service-level objectives: bounds on a request's latencies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from eyas.bench.records import RequestRecord
from eyas.common.errors import ConfigError

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
KINDS = ("ttft", "tpot", "e2e")


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
