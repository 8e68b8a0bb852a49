"""Process groups of `torch.distributed`, in addition to the default group of a process.

A trainer and the workers of a cluster join one for weight updates. The group is created as by SGLang's
trainers: with a store at the address of rank 0, under the name of the group.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from typing import Any

from eyas.common.machine.processes import with_variable

NAP_S, LOOK_S = 0.001, 0.1
LEAST_S = 1.0
"""The least time to join after rank 0 has started to listen, even if the deadline is closer."""
BROADCAST_S = 120.0
"""The timeout of a broadcast of one tensor from rank 0."""
UNWATCHED = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"
"""Keeps NCCL's watchdog from ending this process, which serves requests, when a peer dies."""


class MetGroup:
    """A process group that all its processes have joined.

    Raises RuntimeError if they do not join within `wait_s`, or for a name that this process uses already.
    `on_device`: it carries tensors of GPUs, else of the CPU. Torch is imported only here, since gateways,
    which also import this module, do without it.
    """

    def __init__(self, name: str, address: str, rank: int, size: int, backend: str, wait_s: float) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        inside: Any = distributed_c10d  # public calls only create subgroups of the default group
        deadline = time.monotonic() + wait_s
        if rank:
            _wait_for_listener(address, wait_s)
        timeout = datetime.timedelta(seconds=max(deadline - time.monotonic(), LEAST_S))
        meeting = next(inside.rendezvous(f"tcp://{address}", rank, size, timeout=timeout))
        store = dist.PrefixStore(name, meeting[0])
        store.set_timeout(timeout)
        with with_variable(*UNWATCHED):
            group, _ = inside._new_process_group_helper(
                size, rank, [], backend, store, group_name=name, timeout=timeout
            )
        inside._world.pg_group_ranks[group] = {i: i for i in range(size)}
        inside._set_pg_timeout(datetime.timedelta(seconds=BROADCAST_S), group)
        self._group: Any = group
        self.on_device = backend == "nccl"

    def broadcast(self, tensor: Any) -> None:
        """Broadcasts a tensor from rank 0, in place; returns when the data has arrived.

        Raises RuntimeError after `BROADCAST_S`, or if rank 0 has ended; the caller must then leave the group.
        """
        import torch
        import torch.distributed as dist

        work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        if not self.on_device:
            work.wait()
            return
        with torch.cuda.device(tensor.device):
            work.wait()  # makes the stream wait, not this thread
            arrived = torch.cuda.Event()
            arrived.record()
        if not waited_for(arrived.query, BROADCAST_S):
            self._abort()
            raise RuntimeError(f"nothing came from rank 0 for {BROADCAST_S:g} s")

    def leave(self) -> None:
        """Leaves the group; its name can be used again."""
        import torch.distributed as dist

        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _abort(self) -> None:
        """Ends kernels that wait for a peer on the device."""
        from torch.distributed import distributed_c10d

        inside: Any = distributed_c10d
        group, self._group = self._group, None
        inside._abort_process_group(group)


def _wait_for_listener(address: str, wait_s: float) -> None:
    """Waits until rank 0 listens; raises RuntimeError after `wait_s`. Torch itself exceeds its timeout."""
    host, _, port = address.rpartition(":")
    deadline, reason = time.monotonic() + wait_s, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), left).close()
            return
        except OSError as error:
            reason = str(error)
            time.sleep(min(LOOK_S, max(deadline - time.monotonic(), 0)))
    raise RuntimeError(f"nobody listens there for {wait_s:g} s: {reason}")


def waited_for(done: Callable[[], bool], wait_s: float) -> bool:
    """Polls `done` for up to `wait_s`; returns whether it became true."""
    deadline = time.monotonic() + wait_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(NAP_S)
    return True
