"""From a mapped file to a GPU: threads fill pinned memory piece by piece, the GPU fetches it from there.

A plain copy from mapped memory takes every page fault and every byte in one thread, with the link idle
meanwhile. It knows tensors, not files nor names.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

PIECE_BYTES = 16 * 2**20
READERS = 4


@dataclass(frozen=True)
class _Buffer:
    """Pinned memory; `fetched` is the event after which it may be written again."""

    memory: torch.Tensor = field(
        default_factory=lambda: torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    )
    fetched: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Staging:
    """The way to one GPU; `close` ends its threads."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._readers = ThreadPoolExecutor(READERS, "weights")
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(2 * READERS):  # while the GPU fetches one, its reader fills another
            self._buffers.put(_Buffer())

    def close(self) -> None:
        self._readers.shutdown()

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device, in the order of the caller's stream.

        `source`: on the CPU, with its last dimension contiguous and at most PIECE_BYTES long.
        """
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        stream = torch.cuda.current_stream(target.device)
        rows = source.reshape(-1, source.shape[-1])
        height = rows_of_a_piece(rows)
        pairs = zip(rows.split(height), target.view(rows.shape).split(height), strict=True)
        copies = [self._readers.submit(self._copy, piece, to, stream) for piece, to in pairs]
        for copy in copies:
            copy.result()
        return target

    def _copy(self, piece: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> None:
        buffer = self._buffers.get()
        try:
            buffer.fetched.synchronize()
            staged = buffer.memory[: piece.nbytes].view(piece.dtype).view(piece.shape)
            copy_bytes(piece, staged)
            with torch.cuda.stream(stream):
                target.copy_(staged, non_blocking=True)
                buffer.fetched.record(stream)
        finally:
            self._buffers.put(buffer)


def rows_of_a_piece(rows: torch.Tensor) -> int:
    """How many rows of a matrix fit into PIECE_BYTES."""
    return max(1, PIECE_BYTES // max(1, math.prod(rows.shape[1:]) * rows.itemsize))


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies within the CPU's memory in the calling thread alone; torch would start threads of its own."""
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
