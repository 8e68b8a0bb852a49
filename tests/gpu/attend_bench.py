"""What attention is measured on: cases, a pool of random rows, and the results that must come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from eyas.bench.kernels.attention import ancestors
from eyas.engine.kernels.attention.attend import AttentionLaunch, QueryRows
from eyas.engine.kernels.attention.paged import PagedKv

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 32, 8, 128, 16, 16
_MOST_PARTS = 16
BATCH = 128
_POOL_ROWS = 600_000  # 39 GB in 16 layers
_LONGEST = 8192 + 64
_KEY_BYTES = 2 * KV_HEADS * DIM * 2  # a row's key and value in one layer

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Sequences of these lengths without their `width` query rows."""

    name: str
    lengths: tuple[int, ...]
    width: int = 1
    tree: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.lengths) * _KEY_BYTES

    def speed(self, us: float) -> str:
        return f"{self.nbytes / us / 1e3:5.0f} GB/s"

    @property
    def rows(self) -> int:
        """Rows that share a key head."""
        return self.width * HEADS // KV_HEADS


@dataclass(frozen=True)
class Prompt:
    """Chunks of (prefix, count)."""

    name: str
    chunks: tuple[tuple[int, int], ...]

    def speed(self, us: float) -> str:
        pairs = sum(count * prefix + count * (count + 1) // 2 for prefix, count in self.chunks)
        return f"{4 * HEADS * DIM * pairs / us / 1e6:5.0f} TFLOP/s"


def _ragged(batch: int, least: int, most: int) -> tuple[int, ...]:
    """Evenly spread lengths, the longest first, as the engine orders them."""
    return tuple(most - (most - least) * i // (batch - 1) for i in range(batch))


PLAIN = (
    Case("bs1 x 1024", (1024,)),
    Case("bs1 x 512", (512,)),
    Case("bs8 x 512", (512,) * 8),
    Case("bs32 x 1024", (1024,) * 32),
    Case("bs8 x 8192", (8192,) * 8),
    Case("bs64 x 1024", (1024,) * 64),
    Case("bs128 x 4096", (4096,) * BATCH),
    Case("bs128 x 64 .. 8192", _ragged(BATCH, 64, 8192)),
    *(Case(f"bs{batch} x 100 .. 1600", _ragged(batch, 100, 1600)) for batch in (24, 32, 48, 64)),
)
CHAINS = (
    Case("chain 4, bs1 x 1024", (1024,), 4),
    Case("chain 4, bs8 x 1024", (1024,) * 8, 4),
    Case("chain 4, bs32 x 1024", (1024,) * 32, 4),
    Case("chain 4, bs32 x 100 .. 1600", _ragged(32, 100, 1600), 4),
)
TREES = (
    Case("tree 32, bs1 x 1024", (1024,), 32, True),
    Case("tree 32, bs4 x 1024", (1024,) * 4, 32, True),
    Case("tree 32, bs32 x 1024", (1024,) * 32, 32, True),
)
PROMPTS = (
    Prompt("8192 causal", ((0, 8192),)),
    Prompt("2048 after 6144", ((6144, 2048),)),
    Prompt("8 of 1024", ((0, 1024),) * 8),
    Prompt("512 after 512", ((512, 512),)),
)


class Pool:
    """Random keys and values of 16 layers, and page tables that scatter every sequence over all of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        pages = _POOL_ROWS // PAGE
        self._pool = torch.empty(pages, LAYERS, 2, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self._pool.normal_()
        self._pages = torch.randperm(pages, device="cuda").int()
        self._tables = torch.zeros(2 * BATCH, _LONGEST // PAGE, dtype=torch.int32, device="cuda")

    def layer(self, index: int) -> PagedKv:
        return PagedKv(self._pool[:, index % LAYERS], self._tables)

    def launch(self, cases: Sequence[Case]) -> AttentionLaunch:
        """With room for any cut of these cases."""
        heads = HEADS * max(len(case.lengths) * case.width for case in cases)
        launch = AttentionLaunch.on(self.layer(0), HEADS, batch=1, width=1, pdl=True)
        return replace(
            launch,
            parts=torch.empty(_MOST_PARTS * heads, DIM, device="cuda"),
            lses=torch.empty(_MOST_PARTS * heads, device="cuda"),
            tickets=torch.zeros(heads, dtype=torch.int32, device="cuda"),
        )

    def seat(self, ends: Sequence[int]) -> None:
        """Gives slot i pages for ends[i] rows."""
        taken = 0
        for slot, end in enumerate(ends):
            count = -(-end // PAGE)
            self._tables[slot, :count] = self._pages[taken : taken + count]
            taken += count

    def expected(self, q: torch.Tensor, slot: int, seen: torch.Tensor) -> torch.Tensor:
        """q [n, heads, dim] over layer 0's rows where seen [n, rows]."""
        row = torch.arange(seen.shape[1], device="cuda")
        page = self._tables[slot, row // PAGE].long()
        k, v = (
            self._pool[page, 0, which, row % PAGE].float().repeat_interleave(HEADS // KV_HEADS, 1)
            for which in (0, 1)
        )
        scores = torch.einsum("nhd,khd->hnk", q.float(), k) / DIM**0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hnk,khd->nhd", weights, v)


def queries_of(case: Case, first_slot: int) -> QueryRows:
    """A tree is binary, its nodes in order of depth."""
    batch = len(case.lengths)
    return QueryRows(
        slots=torch.arange(batch, dtype=torch.int32, device="cuda") + first_slot,
        starts=torch.tensor(case.lengths, dtype=torch.int32, device="cuda"),
        width=case.width,
        mask=torch.tensor([[ancestors(case.width)] * batch], device="cuda") if case.tree else None,
    )


def seen_by(case: Case, sequence: int) -> torch.Tensor:
    """Which rows a sequence's queries see: bool [width, rows]."""
    after = torch.ones(case.width, case.width, dtype=torch.bool, device="cuda").tril()
    if case.tree:
        bits = queries_of(case, 0).mask
        assert bits is not None
        after = (bits[0, 0][:, None] >> torch.arange(case.width, device="cuda")) & 1 > 0
    below = torch.ones(case.width, case.lengths[sequence], dtype=torch.bool, device="cuda")
    return torch.cat((below, after), dim=1)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())
