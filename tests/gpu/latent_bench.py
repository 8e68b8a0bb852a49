"""What latent attention is measured on: cases, pools of random latents, and the results that must come out.

The sizes are those of one of eight ranks of DeepSeek-V3. A pool has several layers, so that what a launch
reads is not in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.bench.kernels.attention import ancestors
from eyas.engine.attention.latent import PagedLatents
from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import LatentSpec
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.attend_tiles import AttentionTiling
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.latent import latent_products
from eyas.engine.kernels.latent.latent_attend import LatentScratch, attend_latents
from eyas.engine.kernels.latent.latent_tiles import latent_tile_rows
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape

HEADS, LATENT, ROTATED, PLAIN, VALUE, PAGE = 16, 512, 64, 128, 128, 16
WIDTH = LATENT + ROTATED
SCALE = 0.1352338
POOL_BYTES = 6e9
COPY_BYTES_PER_US = 4.30e6  # of an H200


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `context` rows before `width` queries of each, a chain or a binary tree."""

    batch: int
    context: int
    width: int = 1
    tree: bool = False

    @property
    def name(self) -> str:
        kind = f"tree {self.width}" if self.tree else f"chain {self.width}" if self.width > 1 else "plain"
        return f"{kind}, {self.batch} x {self.context}"

    @property
    def floor_us(self) -> float:
        """Of reading every latent once."""
        return self.batch * (self.context + self.width) * WIDTH * 2 / COPY_BYTES_PER_US


class Pool:
    """Sequences of equal length, on scattered pages of `layers` layers."""

    def __init__(self, batch: int, rows: int, device: str, layers: int = 0) -> None:
        each = -(-rows // PAGE)
        pages = 1 + batch * each
        page_bytes = PAGE * WIDTH * 2
        self.layers = layers or max(2, min(61, int(POOL_BYTES // (pages * page_bytes))))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(batch + rows)
        shape = (pages, self.layers, 1, PAGE, 1, WIDTH)
        self.tensor = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.view(batch, each).to(device, torch.int32)
        self.rows = rows

    def kv(self, layer: int) -> PagedKv:
        return PagedKv(self.tensor[:, layer % self.layers], self.tables, ScoreScaling(SCALE))

    def kept(self, layer: int, sequence: int) -> torch.Tensor:
        """A sequence's rows [rows, width], float32."""
        pages = self.tensor[:, layer % self.layers][self.tables[sequence].long()]
        return pages.reshape(-1, WIDTH)[: self.rows].float()


class Step:
    """Queries of a case over a pool."""

    def __init__(self, case: Case, device: str, layers: int = 0) -> None:
        self.case = case
        self.pool = Pool(case.batch, case.context + case.width, device, layers)
        like = self.pool.tensor
        generator = torch.Generator(device).manual_seed(3)
        sizes = case.batch * case.width, HEADS, WIDTH
        self.q = torch.randn(sizes, generator=generator, device=device, dtype=like.dtype)
        slots = torch.arange(case.batch, dtype=torch.int32, device=device)
        starts = torch.full_like(slots, case.context)
        self.bits = ancestors(case.width) if case.tree else [(2 << j) - 1 for j in range(case.width)]
        mask = None
        if case.tree:
            mask = torch.tensor(self.bits, device=device).expand(1, case.batch, -1).contiguous()
        self.queries = QueryRows(slots, starts, case.width, mask)
        self.scratch = self._scratch(pdl=False)
        self.factor = torch.randn(HEADS, VALUE, LATENT, generator=generator, device=device, dtype=like.dtype)
        self.factor /= LATENT**0.5
        self.out = like.new_empty(self.q.shape[0], HEADS * VALUE)

    def _scratch(self, pdl: bool, parts: int = 64) -> LatentScratch:
        rows, device = self.q.shape[0] * HEADS * parts, self.q.device
        counts = torch.zeros(self.case.batch, dtype=torch.int32, device=device)
        return LatentScratch(
            torch.empty(rows, LATENT, device=device), torch.empty(rows, device=device), counts, pdl
        )

    def with_pdl(self) -> None:
        self.scratch = self._scratch(True)

    def attend(self, layer: int, tiling: AttentionTiling | None = None) -> torch.Tensor:
        """Values of every head, [rows, heads * value]."""
        parted = attend_latents(self.q, self.pool.kv(layer), self.queries, LATENT, self.scratch, tiling)
        latent_products.values(parted, self.factor, self.out, self.scratch.pdl)
        return self.out

    def only_attend(self, layer: int, tiling: AttentionTiling | None = None) -> object:
        return attend_latents(self.q, self.pool.kv(layer), self.queries, LATENT, self.scratch, tiling)

    def expected(self, layer: int) -> torch.Tensor:
        """As `attend`, in float32 by torch."""
        found, case = [], self.case
        seen = torch.tensor([[bits >> r & 1 for r in range(case.width)] for bits in self.bits])
        for sequence in range(case.batch):
            kept = self.pool.kept(layer, sequence)
            own = slice(sequence * case.width, (sequence + 1) * case.width)
            scores = torch.einsum("jhd,kd->jhk", self.q[own].float(), kept) * SCALE
            after = scores[..., case.context :]
            after.masked_fill_(~seen.bool().to(after.device)[:, None], -torch.inf)
            mixed = torch.einsum("jhk,kd->jhd", scores.softmax(-1), kept[:, :LATENT])
            found.append(torch.einsum("jhd,hvd->jhv", mixed, self.factor.float()).flatten(1))
        return torch.cat(found)


class PromptStep:
    """A chunk of `count` rows behind a prefix, of one sequence: its queries, as a product gives them."""

    def __init__(self, prefix: int, count: int, device: str, layers: int = 0) -> None:
        self.prefix, self.count = prefix, count
        self.pool = Pool(1, prefix + count, device, layers)
        like, none = self.pool.tensor, torch.full((count,), -1, dtype=torch.int32, device=device)
        self.q = torch.randn(count, HEADS * (PLAIN + ROTATED), device=device, dtype=like.dtype)
        most = latent_tile_rows(HEADS)
        tiles = [(0, i, prefix + i, min(most, count - i)) for i in range(0, count, most)]
        places = torch.arange(prefix, prefix + count, dtype=torch.int32, device=device)
        self.rows = ForwardRows(
            none, places, none, None, torch.tensor(tiles, dtype=torch.int32, device=device)
        )
        angles = torch.outer(torch.arange(prefix + count).float(), 0.7 ** torch.arange(ROTATED // 2)).to(
            device
        )
        sizes = {"keys": (PLAIN, LATENT), "values": (VALUE, LATENT)}
        factors = {
            name: torch.randn(HEADS, *size, device=device, dtype=like.dtype) / size[name == "values"] ** 0.5
            for name, size in sizes.items()
        }
        self.heads = LatentHeads(SCALE, rotation=RotaryInput(angles.cos(), angles.sin(), places), **factors)
        kept = KvFormat(1, 1, WIDTH, LATENT)
        shape = PoolShape(kept, like.shape[0], PAGE, like.dtype, str(like.device))
        spec = LatentSpec(
            num_heads=HEADS, num_kv_heads=1, head_dim=WIDTH, rope=RopeConfig(), scale=SCALE, kv_rank=LATENT,
            query_rank=1536, plain_dim=PLAIN, value_dim=VALUE,
        )  # fmt: skip
        self._prompts = ExpandedPrompts(spec, shape)
        self._ways = [
            PagedLatents(self.pool.tables, HEADS, shape, RowLimits(1, 1), pdl=False, prompts=prompts)
            for prompts in (None, self._prompts)
        ]
        self.expands = self._prompts.plan([QuerySpan(self.pool.tables[0].tolist(), prefix, count)])

    @property
    def pairs(self) -> float:
        return self.count * self.prefix + self.count * (self.count + 1) / 2

    def absorbed(self, layer: int) -> torch.Tensor:
        """Values of every head, [count, heads * value]."""
        return self._ways[0](self.q, self.pool.kv(layer).pool, self.rows, self.heads)

    def expanded(self, layer: int) -> torch.Tensor:
        """The same in the other form."""
        rows = dataclasses.replace(self.rows, planned=True)
        return self._ways[1](self.q, self.pool.kv(layer).pool, rows, self.heads)

    def expected(self, layer: int, rows: Sequence[int]) -> torch.Tensor:
        """Of some rows, float32."""
        kept = self.pool.kept(layer, 0)
        picked = torch.tensor(rows, device=kept.device)
        plain, key = self.q[picked].view(len(rows), HEADS, -1).float().split((PLAIN, ROTATED), -1)
        places = self.rows.positions[picked].long()
        c, s = (table[places][:, None] for table in (self.heads.rotation.cos, self.heads.rotation.sin))
        low, high = key.chunk(2, -1)
        into = torch.einsum("mhp,hpl->mhl", plain, self.heads.keys.float())
        q = torch.cat((into, low * c - high * s, high * c + low * s), -1)
        found = []
        for query, row in zip(q, rows, strict=True):
            seen = kept[: self.prefix + row + 1]
            mixed = (query @ seen.T * SCALE).softmax(-1) @ seen[:, :LATENT]
            found.append(torch.einsum("hl,hvl->hv", mixed, self.heads.values.float()).flatten())
        return torch.stack(found)


class FirstRows:
    """What stands before attention: rows of the first product, and of queries."""

    def __init__(self, m: int, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.x = torch.randn(m, 1536 + WIDTH, device=device, dtype=dtype)
        self.q = torch.randn(m, HEADS * (PLAIN + ROTATED), device=device, dtype=dtype)
        self.keys = torch.randn(HEADS, PLAIN, LATENT, device=device, dtype=dtype) / PLAIN**0.5
        self.gains = [torch.rand(size, device=device).to(dtype) + 0.5 for size in (LATENT, 1536)]
        angles = torch.outer(torch.arange(9000.0), 0.7 ** torch.arange(ROTATED // 2)).to(device)
        places = torch.randint(9000, (m,), device=device, dtype=torch.int32)
        self.rotation = RotaryInput(angles.cos(), angles.sin(), places)
        pool = torch.zeros(m // PAGE + 1, 3, 1, PAGE, 1, WIDTH, device=device, dtype=dtype)
        self.kv = KvRows(pool[:, 1], torch.arange(m, device=device, dtype=torch.int32))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """x [m, .., rotated]."""
        c, s = (table[self.rotation.positions.long()] for table in (self.rotation.cos, self.rotation.sin))
        c, s = (table.view(len(c), *[1] * (x.dim() - 2), -1) for table in (c, s))
        low, high = x.float().chunk(2, -1)
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    def kept(self) -> torch.Tensor:
        """What `write_latents` keeps, float32."""
        latent, key = self.x[:, 1536:].float().split((LATENT, ROTATED), 1)
        return torch.cat((self.normed(latent, self.gains[0]), self.turned(key)), 1)

    def normed(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain.float()

    def absorbed(self) -> torch.Tensor:
        plain, rotated = self.q.view(len(self.q), HEADS, -1).split((PLAIN, ROTATED), -1)
        into = torch.einsum("mhp,hpl->mhl", plain.float(), self.keys.float())
        return torch.cat((into, self.turned(rotated)), -1)
