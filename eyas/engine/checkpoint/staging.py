"""Copies tensors from a mapped file to a GPU: threads fill pinned memory piece by piece, the GPU reads that.

A plain copy from mapped memory handles every page fault and every byte in one thread, while the link idles.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

from eyas.engine.kv.pinned import short_pieces

PIECE_BYTES = 4 * 2**20  # a matrix has several, so that all readers have one
READERS = 4


@dataclass(frozen=True)
class _PinnedBuffer:
    """Pinned memory. It may be written again after the event `fetched`."""

    memory: torch.Tensor = field(
        default_factory=lambda: torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    )
    fetched: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class WeightStaging:
    """The pinned buffers and reader threads for one GPU, until `close`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._readers = ThreadPoolExecutor(READERS, "weights")
        self._buffers: SimpleQueue[_PinnedBuffer] = SimpleQueue()
        for _ in range(2 * READERS):  # while the GPU reads one, the reader fills another
            self._buffers.put(_PinnedBuffer())

    def close(self) -> None:
        """Ends the threads, after the copies that they have begun."""
        self._readers.shutdown()

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `source` on the device, in the order of the caller's stream.

        `source` is on the CPU. If it is not contiguous, its last dimension is, and at most PIECE_BYTES long.
        Page-locked memory that is contiguous is read by the GPU itself, in `short_pieces`: it must stay until
        that is done.
        """
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if source.is_pinned() and source.is_contiguous():
            stored, room = (each.reshape(-1).view(torch.uint8) for each in (source, target))
            for start, end in short_pieces(source.data_ptr(), source.nbytes):
                room[start:end].copy_(stored[start:end], non_blocking=True)
            return target
        stream = torch.cuda.current_stream(target.device)
        rows = source.reshape(-1, 1 if source.is_contiguous() else source.shape[-1])
        height = rows_per_piece(rows)
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
            with torch.inference_mode(), torch.cuda.stream(stream):  # of this thread; the caller may be in it
                target.copy_(staged, non_blocking=True)
                buffer.fetched.record(stream)
        finally:
            self._buffers.put(buffer)


def rows_per_piece(rows: torch.Tensor) -> int:
    """The number of rows of the matrix that fit into PIECE_BYTES; at least 1."""
    return max(1, PIECE_BYTES // max(1, math.prod(rows.shape[1:]) * rows.itemsize))


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies within the CPU's memory, in the calling thread only; torch would start threads of its own."""
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
