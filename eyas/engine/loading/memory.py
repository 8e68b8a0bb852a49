"""Measures and computes the number of KV pages that fit on a device next to the weights, and whether copies
of packed weights fit.

Pages are measured once, after the weights are loaded and before a pool exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.common.errors import ConfigError
from eyas.engine.kv.groups import ONE_GROUP, KvGroups, pages_of_longest

FEWEST_PAGES = 64
COPIES_PART = 8  # copies take at most an eighth of a device


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: in total, free, and held by this process (the weights)."""

    total: int
    free: int
    allocated: int

    @classmethod
    def measure(cls, device: str) -> DeviceMemory:
        """The state of a GPU now. Waits for its queued work and empties torch's cache."""
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


@dataclass(frozen=True)
class MemoryDemand:
    """The memory that pages need, and the memory that must stay free.

    `page_bytes`: one page in all pools together. `page_size`, `context_length`: tokens. `rows_ahead`: rows
    that a request may write beyond its last token. `reserve`: bytes for CUDA graphs and activations.
    `groups`: of layers; a page is one of each. `states`: bytes of all slots of states.
    """

    page_bytes: int
    page_size: int
    context_length: int
    rows_ahead: int
    reserve: int
    groups: KvGroups = ONE_GROUP
    states: int = 0

    @property
    def longest(self) -> int:
        """Pages of a request that fills the context."""
        return pages_of_longest(self.groups, self.context_length, self.page_size, self.rows_ahead)


@dataclass(frozen=True)
class CopiesDemand:
    """The bytes of packed weights, of widened copies, and of the pages of a request of full length."""

    weights: int
    copies: int
    longest: int

    def fits(self, memory: DeviceMemory, fraction: float) -> bool:
        """True if copies take a small part of a device without weights, of which `fraction` may be used, and
        leave pages for two requests of full length.
        """
        left = min(int(memory.total * fraction), memory.free) - self.weights - self.copies
        return self.copies * COPIES_PART <= memory.total and left >= 2 * self.longest


def slots_that_fit(memory: DeviceMemory, fraction: float, demand: MemoryDemand, each: int) -> int:
    """Slots of states, of `each` bytes, in half of what is there for slots and pages."""
    return max(_room(memory, fraction, demand), 0) // 2 // each


def _room(memory: DeviceMemory, fraction: float, demand: MemoryDemand) -> int:
    """Bytes for pages."""
    room = min(int(memory.total * fraction) - memory.allocated, memory.free - demand.reserve)
    return room - demand.states


def pool_pages(memory: DeviceMemory, fraction: float, demand: MemoryDemand) -> int:
    """Pages that fit into `fraction` of the device with the weights, and leave the reserve free.

    Raises ConfigError if fewer than FEWEST_PAGES fit, or fewer than a request of full length needs.
    """
    pages = max(_room(memory, fraction, demand), 0) // demand.page_bytes
    if pages < max(FEWEST_PAGES, demand.longest):
        raise _too_few(pages, memory, fraction, demand)
    return pages


def _too_few(pages: int, memory: DeviceMemory, fraction: float, demand: MemoryDemand) -> ConfigError:
    total, free, weights = (f"{size / 2**30:.1f}" for size in (memory.total, memory.free, memory.allocated))
    message = (
        f"{fraction:g} of the GPU's {total} GiB ({free} free) leaves room for {pages} KV pages "
        f"besides {weights} GiB of weights"
    )
    if demand.states:
        message += f" and {demand.states / 2**30:.1f} GiB of slots of states (--state-slots)"
    if pages < FEWEST_PAGES:
        advice = f"{FEWEST_PAGES} is the minimum: raise --mem-fraction-static or share the model (--tp)"
        return ConfigError(f"{message}; {advice}", param="mem-fraction-static")
    fits = pages * demand.page_size - demand.rows_ahead
    return ConfigError(
        f"{message}, and a request of {demand.context_length} tokens needs {demand.longest}; "
        f"lower --context-length to at most {fits} or raise --mem-fraction-static",
        param="context-length",
    )
