"""The ranks of one engine as a process group: collectives across their devices, barriers between their hosts.

A group of one rank holds nothing and costs nothing.

**Same bits everywhere.** Every rank receives the same sum to the bit. So ranks that sample from the same
gathered logits with the same keyed noise agree on every token without exchanging one.

**CUDA graphs.** Sums and gathers may be captured. NCCL creates its communicators and buffers at the first
call of each kind, which a capture does not allow. So run what will be captured once before on every rank, and
synchronise. NCCL's own threads query events meanwhile, so capture with `capture_error_mode="thread_local"`.
All ranks capture and replay the same graphs in the same order, and drop them before `close`.

**Deadlines.** Construction, `least` and `barrier` raise EngineError after `timeout_s`. A captured NCCL
collective whose peer is gone waits forever on the device, and NCCL's watchdog does not see it. So the caller
that waits for a step's result must call `RankFollowers.check` meanwhile; the end of rank 0 ends every
follower.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from eyas.common.errors import EngineError
from eyas.engine.kernels.exchange.exact_ranks import add_in_order
from eyas.engine.parallel.one_shot import GRAIN, OneShot
from eyas.engine.parallel.peer_memory import PeerMemory
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.parallel.row_exchange import ExchangeSizes, RowExchange

LOOK_S = 0.002  # a host that waits for the others polls the store at this interval
GREETING_BYTES = 8 << 20  # small ones need fewer of NCCL's channels


class ProcessGroup:
    """One rank's membership. All ranks construct it at about the same time, on the thread of their steps.

    `device`: "cpu" (gloo) or "cuda:N" (NCCL; becomes the current device). `check` is called while this host
    waits for the others: before it joins them, in `least` and in `barrier`. It raises if one is gone. Raises
    EngineError if a rank does not join within `timeout_s`.
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
        self._shared: list[PeerMemory] = []
        self._one_shot: OneShot | None = None
        self._rows: RowExchange | None = None
        if self.ranks == 1:
            return
        self._device = torch.device(device)
        with self._in_plain_words("joining"):
            self._store = dist.FileStore(rank_info.meeting, self.ranks)
            self._store.set_timeout(self._timeout)
        self.barrier()  # PyTorch's own wait for the others would not notice that one has ended
        with self._in_plain_words("joining"):
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
        """Sends small sums through memory that all ranks map, if the devices can reach each other."""
        if (memory := self._share(OneShot.buffer_bytes(self.ranks))) is not None:
            self._one_shot = OneShot(self.rank, memory.addresses, pdl=self._pdl)

    def share_rows(self) -> None:
        """Has rows that `gather` and `sum_for_owners` take go through memory that all ranks map, however many
        they are, if the devices can reach each other. All ranks call it together, before they capture one.
        """
        if self._one_shot is None:
            return
        if (memory := self._share(ExchangeSizes().buffer_bytes(self.ranks))) is not None:
            self._rows = RowExchange(self.rank, memory.addresses, pdl=self._pdl)

    def _share(self, size: int) -> PeerMemory | None:
        """Memory of `size` bytes per rank until `close`, if the devices can reach each other."""
        memory = PeerMemory.share(size, self._device)
        self._shared += [] if memory is None else [memory]
        return memory

    @property
    def _pdl(self) -> bool:
        return torch.cuda.get_device_capability(self._device) >= (9, 0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` (contiguous, any shape, numbers) by its sum over all ranks."""
        if self.ranks == 1:
            return
        if self._one_shot is not None and self._one_shot.takes(tensor):
            self._one_shot(tensor)
        else:
            self._collective(tensor)

    def _collective(self, tensor: torch.Tensor) -> None:
        """The sum of a tensor that the kernel for small sums does not take."""
        dist.all_reduce(tensor)

    def all_reduce_add(self, tensor: torch.Tensor, residual: torch.Tensor, sums: torch.Tensor) -> None:
        """tensor [m, n] = its sum over all ranks + residual [m, n], m <= 128.

        `sums` float32 [sum_parts(n), 128] receives parts of the rows' sums of squares, in the form in which
        `eyas.engine.kernels.products.skinny.linear` leaves them on one rank.
        """
        if self._one_shot is not None and self._one_shot.takes(tensor) and OneShot.parts(tensor.shape[1]):
            self._one_shot(tensor, residual, sums)
            return
        self.all_reduce(tensor)
        tensor.add_(residual)
        sums.zero_()
        # Written in place, not copied: in a graph, a launch that depends on a copy cannot start early.
        torch.sum(tensor.float().square(), dim=1, out=sums[0, : tensor.shape[0]])

    def sum_in_order(
        self,
        tensor: torch.Tensor,
        residual: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
    ) -> None:
        """tensor [m, n] = residual [m, n] (if given) + rank 0's + rank 1's .., in float32, rounded once.

        Its bits depend neither on m nor on how it is sent; any number of ranks, 1 too. `sums` float32
        [n // skinny.sum_group(n), 128] (m <= 128) receives sums of squares by groups of columns.
        """
        if self._one_shot is not None and self._one_shot.takes(tensor):
            self._one_shot(tensor, residual, sums, exact=True)
        else:
            add_in_order(self._gathered(tensor), tensor, residual, sums)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's [m, n], in the order of the ranks: [ranks, m, n]."""
        if self.ranks == 1:
            return tensor[None]
        parts = tensor.new_empty(self.ranks * tensor.shape[0], tensor.shape[1])
        dist.all_gather_into_tensor(parts, tensor.contiguous())
        return parts.view(self.ranks, *tensor.shape)

    @staticmethod
    def sum_parts(columns: int) -> int:
        """The number of rows of `sums` in `all_reduce_add`, for tensors of `columns` columns."""
        return OneShot.parts(columns) or 1

    def all_gather_columns(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Joins every rank's tensor [m, n] into [m, ranks * n], in the order of the ranks.

        The result is written to `out` if that is given. A group of one rank returns `tensor` itself.
        """
        if self.ranks == 1:
            return tensor
        rows, columns = tensor.shape
        if out is None:
            out = tensor.new_empty(rows, self.ranks * columns)
        out.view(rows, self.ranks, columns).copy_(self._gathered(tensor).transpose(0, 1))
        return out

    @staticmethod
    def exchanged(words: int) -> int:
        """The least number of 32-bit words, not less than these, that `gather` joins in one kernel."""
        grain = int(GRAIN.value)
        return -(-max(words, 1) // grain) * grain

    def gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's tensor, contiguous and of one shape on all, in the ranks' order: [ranks, ...].

        It is written to `out`, which is as large and contiguous, if that is given.
        """
        shape = self.ranks, *tensor.shape
        room = tensor.new_empty(shape) if out is None else out.view(shape)
        if self._one_shot is not None and OneShot.joins(tensor):
            self._one_shot.join(tensor, room)
        elif self._rows is not None and RowExchange.takes(tensor):
            self._rows.gather(tensor, room)
        else:
            self._collect(tensor, room)
        return room

    def _collect(self, tensor: torch.Tensor, room: torch.Tensor) -> None:
        """Joins what no kernel of ours takes."""
        if self.ranks == 1:
            room.copy_(tensor[None])
        else:
            dist.all_gather_into_tensor(room.view(-1), tensor.view(-1))

    def sum_for_owners(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """tensor [ranks * m, n], contiguous -> this rank's rows of its sum over all ranks: `out` [m, n]."""
        if self.ranks == 1:
            out.copy_(tensor)
        elif self._one_shot is not None and OneShot.joins(out) and self._one_shot.takes(out):
            self._one_shot.sum_for_owners(tensor, out)
        elif self._rows is not None and RowExchange.takes(out):
            self._rows.sum_for_owners(tensor, out)
        else:
            self._scatter(tensor, out)
        return out

    def _scatter(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """The sum for its owners of a tensor that no kernel of ours takes."""
        dist.reduce_scatter_tensor(out, tensor)

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Gathers every rank's rows, in the order of the ranks: [sum(counts), ...].

        rows [counts[rank], ...]: this rank's. All ranks know `counts`, of which one at least is not 0.
        """
        most, rest = max(counts), rows.shape[1:]
        own = rows.new_zeros(most, *rest)
        own[: rows.shape[0]] = rows
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(parts, own)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rank r gets the next `sent[r]` of `rows`; back come `received[r]` of rank r, rank after rank.

        rows [sum(sent), ...] -> [sum(received), ...]. What a rank sends, the other must expect.
        """
        came = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(came, rows.contiguous(), list(received), list(sent))
        return came

    def hand_over(
        self, sent: Sequence[tuple[torch.Tensor, int]], received: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Sends contiguous tensors to ranks, and fills others with what ranks send: from one rank to another
        as many, of the same shapes and types, in the same order. Ranks that have neither need not call it.
        """
        ops = [dist.P2POp(dist.isend, each.view(torch.uint8), rank) for each, rank in sent]
        ops += [dist.P2POp(dist.irecv, each.view(torch.uint8), rank) for each, rank in received]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    def greet(self) -> None:
        """Has every rank send to every other: the first time takes 0.2 s, and would be between two steps."""
        sent = torch.zeros(GREETING_BYTES, dtype=torch.uint8, device=self._device)
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        self.hand_over([(sent, rank) for rank in others], [(torch.empty_like(sent), rank) for rank in others])

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's share of a tensor that every rank holds, [ranks * n, ...]: a view [n, ...]."""
        return tensor.chunk(self.ranks)[self.rank]

    def share_of_rows(self, own: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """This rank's share of some rows of a matrix of which each rank holds as many, in their order.

        own [n, columns]: rank r has the rows r * n and on. The rows `ids`, whose number the ranks divide, are
        divided again: [len(ids) / ranks, columns]. Every rank makes room for all of them meanwhile.
        """
        places = torch.tensor(ids, device=own.device) - self.rank * own.shape[0]
        mine = (places >= 0) & (places < own.shape[0])
        rows = own[places.clamp(0, own.shape[0] - 1)].masked_fill_(~mine[:, None], 0.0)
        self.all_reduce(rows)  # of each row, all but one rank add nothing
        return self.rows_of(rows).clone()

    def barrier(self) -> None:
        """Blocks until every rank's host has arrived; devices may still be busy.

        Raises EngineError if one is missing after the group's timeout.
        """
        self.least(0)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers. Blocks until every rank's host has given its own.

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
        """Leaves the group. All ranks call it together, after their last step; a second call does nothing.

        Only for a complete group: if a rank is lost, end the processes instead.
        """
        if self.ranks == 1 or not dist.is_initialized():
            return
        for memory in self._shared:
            memory.close()
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
