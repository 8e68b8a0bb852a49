"""Groups of processes of `torch.distributed` beside the one that a process may be in already.

A trainer and the workers of a cluster meet in one. It is made as SGLang's trainers make theirs: by a store at
the address of rank 0, under the group's name.
"""

from __future__ import annotations

import datetime
from typing import Any


class MetGroup:
    """A group, once all have joined. Raises RuntimeError if they do not within `wait_s`, or for a name that
    this process has already. `on_device`: it carries tensors of GPUs, else of the CPU. Torch is imported when
    a group is made: a gateway has none.
    """

    def __init__(self, name: str, address: str, rank: int, size: int, backend: str, wait_s: float) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        inside: Any = distributed_c10d  # no public call makes a group of other processes than the first's
        timeout = datetime.timedelta(seconds=wait_s)
        meeting = next(inside.rendezvous(f"tcp://{address}", rank, size, timeout=timeout))
        store = dist.PrefixStore(name, meeting[0])
        store.set_timeout(timeout)
        made, _ = inside._new_process_group_helper(
            size, rank, [], backend, store, group_name=name, timeout=timeout
        )
        inside._world.pg_group_ranks[made] = {i: i for i in range(size)}
        self._group: Any = made
        self.on_device = backend == "nccl"

    def broadcast(self, tensor: Any) -> None:
        """Rank 0's tensor comes to all; returns when it is there."""
        import torch.distributed as dist

        dist.broadcast(tensor, src=0, group=self._group)

    def leave(self) -> None:
        """Leaves it; its name is free again."""
        import torch.distributed as dist

        dist.destroy_process_group(self._group)
