"""Page-locked host memory, which copies between a GPU and the host need to run at the link's speed."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator

import torch

from eyas.common.errors import ConfigError

PIECE_BYTES = 2**34
"""Registered at a time: the driver refuses very large pieces. No copy may reach from one into the next."""


SHORT_BYTES = 2**27
"""Registered at a time beside steps, whose launches wait meanwhile: 0.3 s for a GiB on an H200's host."""


def short_pieces(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts memory at addresses that are multiples of SHORT_BYTES; the beginning and the end of each piece.

    So a copy of a part of the memory is cut where it was locked, and its caller needs to know no more of it.
    """
    start = 0
    while start < size:
        end = min(SHORT_BYTES - (address + start) % SHORT_BYTES + start, size)
        yield start, end
        start = end


def pin(host: torch.Tensor) -> None:
    """Locks the pages of a tensor's memory. Raises ConfigError if the driver cannot."""
    for address, size in _pieces(host):
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if error:
            raise ConfigError(f"the driver cannot page-lock {size} bytes of host memory (CUDA error {error})")


def pin_each(pieces: Iterable[torch.Tensor]) -> None:
    """Locks the pages of all pieces, or of none. Raises ConfigError if the driver cannot."""
    locked: list[torch.Tensor] = []
    try:
        for piece in pieces:
            pin(piece)
            locked.append(piece)
    except ConfigError:
        for piece in locked:
            unpin(piece)
        raise


def host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] of the host's memory, zeros; page-locked for a GPU `device`.

    It is touched before it is locked: the driver would do that slowly. Raises ConfigError if it cannot be.
    """
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages for the driver to lock
    room = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        room.zero_()
        with torch.cuda.device(device):  # or a context on GPU 0 would be left
            pin(room)
    return room


def unpin(host: torch.Tensor) -> None:
    """Undoes `pin`; no copy of the memory may be under way."""
    for address, _ in _pieces(host):
        torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def copying_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """The copies in this block run on `stream`, and are done when it ends, however it does. None: no GPU."""
    if stream is None:
        yield
        return
    event = torch.cuda.Event()
    try:
        with (
            torch.cuda.device(stream.device),
            torch.cuda.stream(stream),
        ):  # or a context on GPU 0 would be left
            yield
    finally:  # what was launched before an error writes as well
        event.record(stream)
        event.synchronize()


def _pieces(host: torch.Tensor) -> Iterator[tuple[int, int]]:
    for start in range(0, host.nbytes, PIECE_BYTES):
        yield host.data_ptr() + start, min(PIECE_BYTES, host.nbytes - start)
