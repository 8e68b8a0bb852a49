"""The ranks of one engine as a group: tensors summed and joined across their devices, hosts that wait for
each other.

It knows PyTorch's collectives and the kernel for small sums; what is computed between two of them, and why,
the model knows. A group of one rank holds nothing and costs nothing.

**Same bits everywhere.** A sum comes out equal to the bit on every rank, so ranks that sample from the same
joined logits with the same keyed noise agree on every token without exchanging one.

**CUDA graphs.** Sums and joins may be captured. NCCL makes its communicators and buffers at the first call of
a kind, which a capture does not allow: run what will be captured once before, on every rank, then
synchronise. NCCL's own threads look at events meanwhile, so capture with
`capture_error_mode="thread_local"`. All ranks capture and replay the same graphs in the same order, and drop
them before `close`.

**Deadlines.** Setting up, `least` and `barrier` raise EngineError after `timeout_s`. A captured NCCL
collective whose peer is gone waits for ever on the device, unseen by NCCL's watchdog: whoever waits for a
step's result looks after `Followers.check` meanwhile, and the end of rank 0 ends every follower.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from eyas.common.errors import EngineError
from eyas.engine.parallel.one_shot import OneShot
from eyas.engine.parallel.peer_memory import PeerMemory
from eyas.engine.parallel.ranks import RankInfo

LOOK_S = 0.002  # while a host waits for the others, it looks for them so often


class ProcessGroup:
    """One rank's membership; made on all ranks at about the same time, by the thread that runs the steps.

    `device`: "cpu" (gloo) or "cuda:N" (NCCL; becomes the current device). `check` is called while this host
    waits for the others in `least` and `barrier`, and raises if one is gone. Raises EngineError if a rank has
    not come within `timeout_s`.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        device: str,
        timeout_s: float = 120.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.ranks = rank_info.rank, rank_info.ranks
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._check = check
        self._meetings = 0
        self._memory: PeerMemory | None = None
        self._one_shot: OneShot | None = None
        if self.ranks == 1:
            return
        self._device = torch.device(device)
        with self._in_plain_words("joining"):
            self._store = dist.FileStore(rank_info.meeting, self.ranks)
            self._store.set_timeout(self._timeout)
            self._join()
        if self._device.type == "cuda":
            self._open_one_shot()

    def _join(self) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("collectives", self._store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=self._timeout,
            device_id=self._device if on_gpu else None,
        )

    def _open_one_shot(self) -> None:
        """Small sums go through memory that all ranks map, where the devices can reach each other."""
        self._memory = PeerMemory.share(OneShot.buffer_bytes(self.ranks), self._device)
        if self._memory is not None:
            pdl = torch.cuda.get_device_capability(self._device) >= (9, 0)
            self._one_shot = OneShot(self.rank, self._memory.addresses, pdl=pdl)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces tensor (contiguous, any shape, floating point) by its sum over all ranks."""
        if self.ranks == 1:
            return
        if self._one_shot is not None and self._one_shot.takes(tensor):
            self._one_shot(tensor)
        else:
            self._collective(tensor)

    def _collective(self, tensor: torch.Tensor) -> None:
        """A sum that the kernel for small ones does not take."""
        dist.all_reduce(tensor)

    def all_reduce_add(self, tensor: torch.Tensor, residual: torch.Tensor, sums: torch.Tensor) -> None:
        """tensor [m, n] = its sum over all ranks + residual [m, n], m <= 128.

        `sums` float32 [sum_parts(n), 128] receives parts of the rows' sums of squares, as on one rank
        `eyas.engine.kernels.skinny.linear` leaves them.
        """
        if self._one_shot is not None and self._one_shot.takes(tensor) and OneShot.parts(tensor.shape[1]):
            self._one_shot(tensor, residual, sums)
            return
        self.all_reduce(tensor)
        tensor.add_(residual)
        sums.zero_()
        # Into its place, not copied there: in a graph, launches that depend on a copy cannot be early.
        torch.sum(tensor.float().square(), dim=1, out=sums[0, : tensor.shape[0]])

    @staticmethod
    def sum_parts(columns: int) -> int:
        """Rows of `sums` in `all_reduce_add` for tensors of so many columns."""
        return OneShot.parts(columns) or 1

    def all_gather_columns(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """tensor [m, n] of every rank -> [m, ranks * n], columns in the order of the ranks.

        Several ranks' are put into `out`, if it is given; one rank's are `tensor` itself.
        """
        if self.ranks == 1:
            return tensor
        rows, columns = tensor.shape
        if out is None:
            out = tensor.new_empty(rows, self.ranks * columns)
        parts = tensor.new_empty(self.ranks * rows, columns)
        dist.all_gather_into_tensor(parts, tensor.contiguous())
        out.view(rows, self.ranks, columns).copy_(parts.view(self.ranks, rows, columns).transpose(0, 1))
        return out

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's share of a tensor that every rank holds, [ranks * n, ...]: a view [n, ...]."""
        return tensor.chunk(self.ranks)[self.rank]

    def barrier(self) -> None:
        """Waits on the host until every rank's host is here; devices may still be busy.

        Raises EngineError if one is missing after the group's timeout.
        """
        self.least(0)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; waits on the host until every rank's host has told its own.

        Raises EngineError if one is missing after the group's timeout.
        """
        if self.ranks == 1:
            return number
        self._meetings += 1
        names = [f"meeting {self._meetings} {rank}" for rank in range(self.ranks)]
        self._store.set(names[self.rank], str(number))
        deadline = time.monotonic() + self._timeout.total_seconds()
        with self._in_plain_words("waiting for the others"):
            while not self._store.check(names):
                self._check()
                if time.monotonic() > deadline:
                    raise RuntimeError("not all of them have come")
                time.sleep(LOOK_S)
            return min(int(self._store.get(name)) for name in names)

    def close(self) -> None:
        """Leaves the group, on all ranks together, after their last step. Twice is once.

        For a group that is whole: one that has lost a rank is left by ending its processes.
        """
        if self.ranks == 1 or not dist.is_initialized():
            return
        if self._memory is not None:
            self._memory.close()
        dist.destroy_process_group()

    @contextmanager
    def _in_plain_words(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            limit = self._timeout.total_seconds()
            raise EngineError(
                f"rank {self.rank} of {self.ranks} failed at {doing} (limit {limit:g} s): {error}"
            ) from error
