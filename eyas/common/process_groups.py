"""Groups of processes of `torch.distributed` beside the one that a process may be in already.

A trainer and the workers of a cluster meet in one. It is made as SGLang's trainers make theirs: by a store at
the address of rank 0, under the group's name.
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
"""For the others to join where rank 0 has listened only at the end of the time."""
BROADCAST_S = 120.0
"""For a tensor that a group's rank 0 broadcasts to come."""
UNWATCHED = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"
"""Where this variable is set, NCCL's watchdog ends nothing. Else it would end this process, which serves, if
a peer dies.
"""


class MetGroup:
    """A group, once all have joined. Raises RuntimeError if they do not within `wait_s`, or for a name that
    this process has already. `on_device`: it carries tensors of GPUs, else of the CPU. Torch is imported when
    a group is made: a gateway has none.
    """

    def __init__(self, name: str, address: str, rank: int, size: int, backend: str, wait_s: float) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        inside: Any = distributed_c10d  # no public call makes a group of other processes than the first's
        deadline = time.monotonic() + wait_s
        if rank:
            _wait_for_listener(address, wait_s)
        timeout = datetime.timedelta(seconds=max(deadline - time.monotonic(), LEAST_S))
        meeting = next(inside.rendezvous(f"tcp://{address}", rank, size, timeout=timeout))
        store = dist.PrefixStore(name, meeting[0])
        store.set_timeout(timeout)
        with with_variable(*UNWATCHED):
            made, _ = inside._new_process_group_helper(
                size, rank, [], backend, store, group_name=name, timeout=timeout
            )
        inside._world.pg_group_ranks[made] = {i: i for i in range(size)}
        inside._set_pg_timeout(datetime.timedelta(seconds=BROADCAST_S), made)
        self._group: Any = made
        self.on_device = backend == "nccl"

    def broadcast(self, tensor: Any) -> None:
        """Rank 0's tensor comes to all; returns when it is there. Raises RuntimeError if it does not come
        within `BROADCAST_S`, or rank 0 is gone: then the group must be left.
        """
        import torch
        import torch.distributed as dist

        work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        if not self.on_device:
            work.wait()
            return
        with torch.cuda.device(tensor.device):
            work.wait()  # of the stream alone
            there = torch.cuda.Event()
            there.record()
        if not waited_for(there.query, BROADCAST_S):
            self._abort()
            raise RuntimeError(f"nothing came from rank 0 for {BROADCAST_S:g} s")

    def leave(self) -> None:
        """Leaves it; its name is free again."""
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
    """Raises RuntimeError if none comes: torch looks for one for longer than it is given."""
    host, _, port = address.rpartition(":")
    deadline, said = time.monotonic() + wait_s, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), left).close()
            return
        except OSError as error:
            said = str(error)
            time.sleep(min(LOOK_S, max(deadline - time.monotonic(), 0)))
    raise RuntimeError(f"nobody listens there for {wait_s:g} s: {said}")


def waited_for(over: Callable[[], bool], wait_s: float) -> bool:
    """Waits until something is over, for `wait_s` at most. Whether it is."""
    deadline = time.monotonic() + wait_s
    while not over():
        if time.monotonic() > deadline:
            return False
        time.sleep(NAP_S)
    return True
