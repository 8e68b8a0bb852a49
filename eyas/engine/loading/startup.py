"""An engine's start: where its time goes, and the kernels that other processes compile meanwhile.

This module loads without torch, so that the start can begin before torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import capability
from eyas.engine.kernels.launch.warm import KernelWarmup

# No kernel depends on these.
PLACING = (
    *("tune_seconds", "roles", "worker", "threads", "mem_fraction_static", "host_cache_gb", "pool_dir"),
    "kv_events",
)
SHOWN_S = 0.05  # a shorter time would be shown as 0.0


class StartPhases:
    """A stopwatch for a start: `with phases("weights"): ...`. Times under the same name add up.

    "import" is the time from the start of this process until the stopwatch was made.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds, on the same clock as the start times of processes."""
        self._now = now
        self._began = psutil.Process().create_time()
        self._seconds = {"import": now() - self._began}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures a phase, even if it fails. Phases do not nest."""
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def summary(self) -> str:
        """A line such as "ready in 31.2 s: import 6.1, weights 4.2, other 0.9", in the order of the
        phases.
        """
        total = self._now() - self._began
        other = total - sum(self._seconds.values())
        phases = self._seconds | ({"other": other} if other >= SHOWN_S else {})
        return f"ready in {total:.1f} s: " + ", ".join(f"{name} {s:.1f}" for name, s in phases.items())


@dataclass(frozen=True)
class EngineStart:
    """`phases`: the stopwatch. `warmup`: the kernels being compiled; None: each compiles at its first use."""

    phases: StartPhases = field(default_factory=StartPhases)
    warmup: KernelWarmup | None = None

    @classmethod
    def of(cls, config: EngineConfig, phases: StartPhases | None = None) -> EngineStart:
        """Begins a start. A GPU's kernels come first: they take as long to compile as all else together."""
        phases = phases or StartPhases()
        if config.device == "cpu" or config.attention_backend != "triton":
            return cls(phases)
        try:
            version = capability(config.device)
        except ConfigError:  # no GPU, or its driver does not answer: the engine says it, once torch is there
            return cls(phases)
        usual = {name: getattr(EngineConfig(), name) for name in PLACING}
        nowhere = dataclasses.replace(config, device="cuda", num_pages=1, **usual)
        launches = "draft_launches" if config.only_drafts else "launches"
        name = f"eyas.engine.loading.recipe:{launches}"
        return cls(phases, KernelWarmup(name, (nowhere,), version, len(os.sched_getaffinity(0))))

    def wait_for_kernels(self) -> None:
        """Returns once all kernels are compiled. Raises RuntimeError if one does not compile."""
        if self.warmup is not None:
            self.warmup.wait()
