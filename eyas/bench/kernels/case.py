"""The nouns of a measurement: the setting that kernels run in, a kernel at one size, and its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

import torch

from eyas.common.config import EngineConfig
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models.table import read_model
from eyas.engine.parallel.shards import config_of_rank

Call: TypeAlias = Callable[[], object]
Clock: TypeAlias = Literal["graph", "queue", "host"]

CACHES = 4  # memory that one case goes through, at least, in sizes of the last cache
DEFAULT_CACHE_BYTES = 32 << 20  # where the system does not say
FEWEST_CALLS, MOST_CALLS = 4, 256
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class KernelCalls:
    """The work `calls` times, each on other memory than the one before.

    `nbytes`: what one call must read and write at least; `flops`: what it must compute. `road`: whose
    bandwidth bounds the bytes, "memory" (of the device), "host" (memory of this machine), "to host" or
    "to device". `clock`: "graph" replays a CUDA graph, "queue" launches on a GPU that is kept busy meanwhile,
    "host" takes the time on the host, for calls that have ended when they return. `close` frees what does not
    go with the calls.
    """

    calls: Sequence[Call]
    nbytes: int
    flops: int = 0
    road: str = "memory"
    clock: Clock = "graph"
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class KernelCase:
    """A kernel at one size. `make` takes the memory for it, so one case at a time has its memory."""

    name: str
    make: Callable[[], KernelCalls]


@dataclass(frozen=True)
class KernelSetting:
    """The setting of cases: one rank's share of a model, and the last cache of its device, in bytes."""

    config: EngineConfig
    model: ModelConfig
    cache: int

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Reads the model's config.json and nothing else. Raises ConfigError if it cannot be served."""
        model = read_model(config.model, "dummy", impl="eyas").limited_to(config.context_length)
        return cls(config, config_of_rank(model, config.tensor_parallel_size), cache_bytes(config.device))

    @property
    def device(self) -> str:
        """The device, as the configuration names it."""
        return self.config.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        dtype = getattr(torch, self.config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def fast(self) -> bool:
        """True if the engine runs its own kernels, rather than plain torch."""
        return self.config.attention_backend != "torch"

    @property
    def clock(self) -> Clock:
        """The clock of the device's own kernels."""
        return "host" if self.device == "cpu" else "graph"

    @property
    def pdl(self) -> bool:
        """Programmatic dependent launch, as in the engine."""
        return self.device != "cpu"

    def calls(self, nbytes: int) -> int:
        """The number of calls of `nbytes` each, until none finds its memory in a cache."""
        enough = -(-CACHES * self.cache // max(nbytes, 1))
        return min(max(enough, FEWEST_CALLS), MOST_CALLS)

    def cached(self, work: KernelCalls) -> bool:
        """True if all of the work's memory is so little that a cache may hold it."""
        return len(work.calls) * work.nbytes < 2 * self.cache

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers on the device."""
        return torch.randn(*sizes, dtype=dtype or self.dtype, device=self.device)


def cache_bytes(device: str) -> int:
    """The size of a GPU's L2, or of a CPU's last cache."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in _CPU_CACHES.glob("index*/size")]
    known = [int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS]
    return max(known, default=DEFAULT_CACHE_BYTES)
