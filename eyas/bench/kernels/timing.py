"""Times a call, and the limits of this machine beside it.

A call is timed by a replayed CUDA graph, by a queue of launches, or by the host's clock; `tests/gpu` times by
these too. A call's floor is the time that its bytes take at the speed of the fastest pass over memory, or its
operations at the speed of one large product, whichever is longer. It is measured here, not a theoretical
limit.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from eyas.bench.kernels.case import CACHES, KernelCalls, KernelSetting

REPLAYS = 11  # of the graph; the first two warm up
BUSY_CYCLES = 20_000_000  # about 10 ms: the host is ahead of the GPU from the first launch on
ROUNDS = 11  # by the host's clock: through all calls, as long as that takes no longer than
HOST_S, FEWEST_TIMES = 0.5, 5
Call = Callable[[], object]
SIDE_GPU, SIDE_CPU = 8192, 1024  # of the square product
COPY_BYTES_GPU = 1 << 30


def graph_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Microseconds of one of the calls: the median of replays of all of them, in one CUDA graph.

    The calls are captured in their order, so each one's memory is as cold as the others leave it.
    """
    calls[0]()  # compiles, and takes what memory it keeps
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph would collect garbage every time
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times[2:]))


def queue_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Measures as `graph_us`, for calls that no graph takes: launched while the GPU is kept busy by something
    else.
    """
    calls[0]()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times[2:]))


def host_us(calls: Sequence[Call]) -> float:
    """Microseconds of one of the calls by the host's clock, the median of many; each must have ended."""
    calls[0]()
    times: list[float] = []
    deadline = time.perf_counter() + HOST_S
    for call in itertools.chain.from_iterable(itertools.repeat(calls, ROUNDS)):
        before = time.perf_counter()
        call()
        after = time.perf_counter()
        times.append(after - before)
        if after > deadline and len(times) >= FEWEST_TIMES:
            break
    return 1e6 * statistics.median(times)


CLOCKS = {"graph": graph_us, "queue": queue_us, "host": host_us}


@dataclass(frozen=True)
class MachineLimits:
    """`bandwidth`: bytes per second by road ("memory" and "host": read and written together). `flops`: per
    second, in products of the setting's dtype.
    """

    bandwidth: dict[str, float]
    flops: float

    @classmethod
    def measure(cls, setting: KernelSetting) -> Self:
        """Takes about a second."""
        host = _host_copy(setting)
        if setting.device == "cpu":
            return cls({"memory": host, "host": host}, _product(setting, SIDE_CPU))
        pinned = torch.empty(COPY_BYTES_GPU // 4, dtype=torch.uint8, pin_memory=True)
        part = torch.empty_like(pinned, device=setting.device)
        return cls(
            {
                "memory": _device_memory(setting),
                "host": host,
                "to host": _crossing(part, pinned),
                "to device": _crossing(pinned, part),
            },
            _product(setting, SIDE_GPU),
        )

    def us(self, work: KernelCalls) -> float:
        """Microseconds that one call takes at least."""
        return 1e6 * max(work.nbytes / self.bandwidth[work.road], work.flops / self.flops)

    def bound(self, work: KernelCalls) -> str:
        """The limit that sets the floor: "bytes" or "flops"."""
        return "bytes" if work.nbytes / self.bandwidth[work.road] >= work.flops / self.flops else "flops"

    def __str__(self) -> str:
        roads = ", ".join(f"{road} {speed / 1e9:,.1f} GB/s" for road, speed in self.bandwidth.items())
        return f"passes: {roads}; products: {self.flops / 1e12:,.3g} TFLOP/s"


def _device_memory(setting: KernelSetting) -> float:
    """Bytes per second of the fastest pass: a copy, a kernel that reads and writes, one that only reads."""
    there = torch.ones(COPY_BYTES_GPU // 4, device=setting.device)
    other, total = torch.empty_like(there), torch.empty((), device=setting.device)
    passes = {
        2 * there.nbytes: (lambda: other.copy_(there), lambda: torch.neg(there, out=other)),
        there.nbytes: (lambda: torch.amax(there, (), out=total),),
    }
    return max(nbytes / graph_us([call] * 4) * 1e6 for nbytes, calls in passes.items() for call in calls)


def _host_copy(setting: KernelSetting) -> float:
    """Bytes read and written per second by one thread, between buffers that no cache holds."""
    size = CACHES * setting.cache if setting.device == "cpu" else 256 << 20
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return 2 * size / host_us([lambda: np.copyto(target, source)]) * 1e6


def _crossing(source: torch.Tensor, target: torch.Tensor) -> float:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return source.nbytes / host_us([copy]) * 1e6


def _product(setting: KernelSetting, side: int) -> float:
    a, b = setting.normal(side, side), setting.normal(side, side)
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    us = host_us([multiply]) if setting.device == "cpu" else graph_us([multiply] * 4)
    return 2 * side**3 / us * 1e6
