"""Times a call: by a replayed CUDA graph, by a queue of launches, or by the host's clock.

`tests/gpu` times by it too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPLAYS = 11  # of the graph; the first two warm up
BUSY_CYCLES = 20_000_000  # about 10 ms: the host is ahead of the GPU from the first launch on
ROUNDS = 11  # by the host's clock: through all calls, as long as that takes no longer than
HOST_S, FEWEST_TIMES = 0.5, 5

Call = Callable[[], object]


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
