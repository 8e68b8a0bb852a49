"""Records graphs of launches, many in one pool of memory.

torch.cuda.graph gives all cached memory back to the driver before each graph, the host's too, and what runs
between two graphs takes it again: with 71 graphs that is a part of a start. Here it is given back once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_CAPTURE = "thread_local"
"""How graphs are captured: other threads may do as they like, and NCCL's look at its events all the time."""


class GraphRecorder:
    """The pool of some graphs, no two of which are replayed at once, and the stream that records them."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()  # a recording cannot take what is cached outside its pool
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Everything that is launched inside goes into `graph`, and does not run."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode=_CAPTURE)
            try:
                yield
            finally:
                graph.capture_end()
