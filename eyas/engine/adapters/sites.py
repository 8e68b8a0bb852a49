"""The products that adapters update, and an adapter as these read it: one block of numbers.

A product's matrix may be several of the model's, one below the other, and in another order; of several ranks
each has a share. An adapter's factors are cut, joined and ordered like the matrix, so a product reads its
rows once for all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch

from eyas.common.errors import InvalidRequest
from eyas.engine.adapters.peft import PeftAdapter
from eyas.engine.checkpoint.host_tensors import DTYPES, READERS, HostTensors, Room, laid_out
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.ipc.adapter_messages import LORA_PATH

GRAIN = 16
"""Ranks are filled up to a multiple of it with zeros, as products and kernels need."""
NUMBERS = "numbers"
"""The name of the tensor from which slots are filled: an adapter's first."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class SitePart:
    """A matrix of the model: its name, its whole shape [rows, columns], and the dimension that ranks divide
    (None: each has all of it).
    """

    name: str
    shape: tuple[int, int]
    divided: int | None = None

    def own(self, placement: WeightPlacement) -> tuple[int, int]:
        """The shape of a rank's share."""
        rows, columns = self.shape
        if self.divided is None:
            return rows, columns
        return (rows // placement.ranks, columns) if self.divided == 0 else (rows, columns // placement.ranks)


@dataclass(frozen=True)
class AdapterSite:
    """A product whose matrix [n, k] adapters update: this rank's share of `parts`, one below the other, with
    its rows in `order` (int64 [n]; None: as they are), and its columns times `gain` [k], if there is one.
    """

    parts: tuple[SitePart, ...]
    placement: WeightPlacement
    order: torch.Tensor | None = None
    gain: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k]."""
        shapes = [part.own(self.placement) for part in self.parts]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    @property
    def part_of_rows(self) -> torch.Tensor:
        """The part that each row is of, int32 [n]."""
        counts = torch.tensor([part.own(self.placement)[0] for part in self.parts])
        parts = torch.arange(len(self.parts), dtype=torch.int32).repeat_interleave(counts)
        return parts if self.order is None else parts[self.order]

    def in_order(self, rows: torch.Tensor) -> Self:
        """The site of the same matrix with its rows in this order."""
        rows = rows.cpu()
        return replace(self, order=rows if self.order is None else self.order[rows])

    def below(self, lower: Self) -> Self:
        """The site of this matrix with another one below it."""
        first = self.shape[0]
        orders = [torch.arange(site.shape[0]) if site.order is None else site.order for site in (self, lower)]
        order = torch.cat((orders[0], orders[1] + first))
        return replace(self, parts=(*self.parts, *lower.parts), order=order)

    def rank(self, adapter: PeftAdapter) -> int:
        """The rank of an adapter's factors here, filled up; 0: it updates no part."""
        ranks = [adapter.updates[part.name].rank for part in self.parts if part.name in adapter.updates]
        return filled(max(ranks, default=0))

    def words(self, rank: int) -> int:
        """The numbers of both factors of that rank."""
        n, k = self.shape
        return (len(self.parts) * k + n) * rank

    def write(self, adapter: PeftAdapter, room: torch.Tensor) -> None:
        """Writes both factors into `room` [words], zeros: the lower one of each part [parts, rank, k], then
        the upper one of all rows, transposed, [rank, n].
        """
        (n, k), rank = self.shape, self.rank(adapter)
        self.write_lower({name: update.down for name, update in adapter.updates.items()}, room, rank)
        rows, first = torch.zeros(n, rank, dtype=room.dtype), 0
        for part in self.parts:
            count, _ = part.own(self.placement)
            update = adapter.updates.get(part.name)
            if update is not None:
                stored = self._own_rows(part, update.stored)
                if stored.dtype != room.dtype:  # else it is rounded once, as float32 is
                    stored = stored.float()
                torch.mul(stored, update.scaling, out=rows[first : first + count, : update.rank])
            first += count
        if self.order is not None:
            rows = rows.index_select(0, self.order)
        ups = room[len(self.parts) * rank * k :].view(rank, n)
        for own, half in zip(ups.chunk(2, dim=1), rows.chunk(2), strict=True):  # a whole one would take twice
            own.copy_(half.t())  # .. as long: torch transposes in blocks that are wider than a rank

    def write_lower(self, lower: Mapping[str, torch.Tensor], room: torch.Tensor, rank: int) -> None:
        """Writes the lower factors alone, with the gain as it is now. `lower`: as they are stored, by the
        names of parts; `rank`: that of the factors in `room`.
        """
        downs = room[: len(self.parts) * rank * self.shape[1]].view(len(self.parts), rank, -1)
        for part, down in zip(self.parts, downs, strict=True):
            if (stored := lower.get(part.name)) is not None:
                own = self._own_columns(part, stored)
                scaled = own if self.gain is None else own.float() * self.gain
                down[: len(own)].copy_(scaled)

    def _own_rows(self, part: SitePart, up: torch.Tensor) -> torch.Tensor:
        """This rank's rows of an upper factor."""
        rows, _ = part.own(self.placement)
        first = self.placement.rank * rows
        return up[first : first + rows] if part.divided == 0 else up

    def _own_columns(self, part: SitePart, down: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a lower factor."""
        _, columns = part.own(self.placement)
        first = self.placement.rank * columns
        return down[:, first : first + columns] if part.divided == 1 else down


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter as the products of one rank read it, in the host's memory. `places` int64 [sites, 2]: where
    the numbers of a site begin, and their rank. `folder`: where it was read. `memory`: the numbers, and the
    factors that have taken a gain, as they are stored, by the names of their parts: a gain may change.
    """

    id: str
    rank: int
    folder: Path
    places: torch.Tensor
    memory: HostTensors

    @cached_property
    def numbers(self) -> torch.Tensor:
        """The factors of all sites, as `AdapterSite.write` has them, [words]."""
        return self.memory.tensor(NUMBERS)

    @property
    def lower(self) -> dict[str, torch.Tensor]:
        """The factors that have taken a gain."""
        return {name: self.memory.tensor(name) for name in self.memory.keys() if name != NUMBERS}

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory."""
        return self.memory.nbytes


class AdapterSites:
    """All products of a model that adapters update, by number."""

    def __init__(self, sites: Sequence[AdapterSite]) -> None:
        self.sites = sites
        self._shapes = {part.name: part.shape for site in sites for part in site.parts}

    def words(self, rank: int) -> int:
        """The most numbers of an adapter of that rank."""
        return sum(site.words(filled(rank)) for site in self.sites)

    def check(self, name: str, shape: tuple[int, int]) -> None:
        """Raises InvalidRequest for an update of what is updated nowhere, or of another shape."""
        module = name.removesuffix(".weight")
        if name not in self._shapes:
            text = f"{module} is no linear module of this model's layers"
            others = "embeddings and kv_b_proj are not; experts and routers are with --lora-experts"
            raise InvalidRequest(f"{text}, or none that adapters update ({others})", param=LORA_PATH)
        if self._shapes[name] != shape:
            text = f"an update of {module} is {shape}, and the matrix is {self._shapes[name]}"
            raise InvalidRequest(f"{text}: it is another model's", param=LORA_PATH)

    def packed(
        self,
        adapter: PeftAdapter,
        folder: Path,
        gains: torch.Tensor | None = None,
        room: Room = HostTensors,
    ) -> PackedAdapter:
        """The numbers of an adapter whose matrices have passed `check`. `folder`: where it was read; `gains`:
        as of `gains`, if they are not those of the sites; `room`: gives memory, zeros.

        Raises InvalidRequest for numbers that are too large.
        """
        dtype = self.sites[0].placement.dtype
        ranks = [site.rank(adapter) for site in self.sites]
        counts = [site.words(rank) for site, rank in zip(self.sites, ranks, strict=True)]
        gained = {part.name for site in self.sites if site.gain is not None for part in site.parts}
        lower = {name: update.down for name, update in adapter.updates.items() if name in gained}
        kinds = [(name, _NAMES[down.dtype], tuple(down.shape)) for name, down in lower.items()]
        memory = room(laid_out([(NUMBERS, _NAMES[dtype], (sum(counts),)), *kinds]))
        for name, down in lower.items():
            memory.tensor(name).copy_(down)
        rooms, starts = memory.tensor(NUMBERS).split(counts), list(accumulate(counts, initial=0))[:-1]
        sites = zip(self._on_host(self.gains if gains is None else gains), rooms, ranks, strict=True)
        with ThreadPoolExecutor(READERS, "packing", lambda: torch.set_num_threads(1)) as packing:
            for write in [packing.submit(site.write, adapter, own) for site, own, rank in sites if rank]:
                write.result()
        places = torch.tensor(list(zip(starts, ranks, strict=True)))
        packed = PackedAdapter(adapter.id, adapter.rank, folder, places, memory)
        _check_finite(packed.numbers)
        return packed

    def renew(self, adapter: PackedAdapter) -> None:
        """Makes the numbers in place what `packed` makes with the gains as they are now.

        Raises InvalidRequest if they have become too large.
        """
        lower, sites = adapter.lower, self._on_host(self.gains)
        for site, (first, rank) in zip(sites, adapter.places.tolist(), strict=True):
            if rank and site.gain is not None:
                site.write_lower(lower, adapter.numbers[first : first + site.words(rank)], rank)
        _check_finite(adapter.numbers)

    @property
    def gains(self) -> torch.Tensor | None:
        """Those of all sites, one after the other, float32 in the host's memory: one copy, since each waits
        for a GPU. None: there are none.
        """
        gains = [site.gain for site in self.sites if site.gain is not None]
        return torch.cat(gains).float().cpu() if gains else None

    def on_host(self) -> AdapterSites:
        """The same with all of it in the host's memory: another process may have it."""
        sites = self._on_host(self.gains)  # their gains are parts of one tensor, which each would send whole
        return AdapterSites(
            [site if site.gain is None else replace(site, gain=site.gain.clone()) for site in sites]
        )

    def _on_host(self, gains: torch.Tensor | None) -> list[AdapterSite]:
        if gains is None:
            return list(self.sites)
        own = iter(gains.split([len(site.gain) for site in self.sites if site.gain is not None]))
        return [site if site.gain is None else replace(site, gain=next(own)) for site in self.sites]


def filled(rank: int) -> int:
    """The rank of factors with the zeros that fill them up."""
    return -(-rank // GRAIN) * GRAIN


def _check_finite(numbers: torch.Tensor) -> None:
    """Raises InvalidRequest for what a narrow type could not hold."""
    if numbers.dtype == torch.float16 and not torch.stack(torch.aminmax(numbers)).isfinite().all():
        raise InvalidRequest(f"its numbers are too large for {numbers.dtype}", param=LORA_PATH)
