"""Both ends of a channel between GPUs, for tests: a decode engine's, on GPU 0, and a draft worker's process.

With one GPU both share it. It knows how they meet, and nothing of what they tell each other.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec
import torch

from eyas.engine.ipc.draft_channel import MailChannel, OfferedChannel
from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import LocalGpu
from kv_transfer.gpu.cuda import CudaDriver

PLACES = 32
THEIRS = torch.cuda.device_count() - 1 if torch.cuda.is_available() else 0
"""The GPU of the draft worker's process."""
MEET_S = 120.0


def gpu(ordinal: int, shape: DraftChannel) -> LocalGpu:
    """As an engine on that GPU has it."""
    return LocalGpu(CudaDriver(ordinal), shape.dtype, partial(torch.cuda.synchronize, ordinal), shared=True)


@contextmanager
def pair(
    folder: Path, shape: DraftChannel, drafter: Callable[..., None], *more: int | str
) -> Iterator[tuple[MailChannel, SpawnProcess]]:
    """The decode engine's end, and the process, which runs `drafter` with the channel that is offered to it,
    the folder and whatever is `more`.
    """
    torch.cuda.set_device(0)
    ours = gpu(0, shape)
    shape = msgspec.structs.replace(shape, gpu=ours.driver.uuid)
    offered = OfferedChannel(folder / "mail", shape, ours)
    told = msgspec.structs.replace(shape, export=offered.export)
    process = multiprocessing.get_context("spawn").Process(target=drafter, args=(told, str(folder), *more))
    process.start()
    try:
        deadline, channel = time.monotonic() + MEET_S, None
        while channel is None:
            channel = offered.accept()
            assert time.monotonic() < deadline and process.is_alive()
        yield channel, process
        channel.close()
    finally:
        process.kill()
        process.join()
