"""Matrix products of at most 128 rows: reading the weight is the whole cost, so all else rides along.

A decoder layer takes four of them (`qkv_rope`, `linear`, `gated`, `linear`) and attention, nothing more.
They are computed transposed, weight rows on the matrix unit's long side. RMSNorm costs no kernel: its gain is
folded into the columns of the next weight at load time, the kernel that writes a row leaves sums of its
squares, and the kernel that reads it scales the finished product by 1 / rms.

Tensors are contiguous, aligned to 16 bytes, with sides that are multiples of 16. None allocates or waits: all
can be captured.

Signatures: one is compiled for each (product, n, k, padded rows 16 / 32 / 64 / 128). A Llama has five
products: qkv_rope, linear with residual and sums (o and down), gated, and a linear to float32 (the head); an
EAGLE-3 head has its own four, its lm_head and fc. Where a norm follows a product, that linear has neither
residual nor sums. Called once each, with `compile_only` or in a recipe of
`compile_ahead`, they compile all that ever runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.arrival import UpdateLaunch
from eyas.engine.kernels.products.block_updates import AdapterBlocks, BlockUpdates
from eyas.engine.kernels.products.few_updates import MOST_BEHIND, FewAdapters, FewUpdates
from eyas.engine.kernels.products.grouped_updates import AdapterGroups, GroupUpdates
from eyas.engine.kernels.products.halving import SUM_GROUP
from eyas.engine.kernels.products.packed import PackedWeight
from eyas.engine.kernels.products.skinny_kernels import (
    SUMS_WIDTH,
    FusedHeads,
    ProductPlan,
    gated_kernel,
    linear_kernel,
    qkv_rope_kernel,
)
from eyas.engine.kernels.products.skinny_tiles import (
    MEASURED,
    MEASURED_INT4,
    MOST_SHARES,
    PACKED_TILES,
    PackedStep,
    ProductShape,
    Table,
    exact_tile_for,
    packed_tile_for,
    tile_for,
)
from eyas.engine.kernels.products.updates import FEW, RowUpdates

Updates = RowUpdates | FewUpdates | GroupUpdates | BlockUpdates
"""What adapters add to a product."""
AdapterRows = FewAdapters | AdapterGroups | AdapterBlocks
"""The adapters of a step's rows, in fast arithmetic."""

MAX_ROWS = SUMS_WIDTH.value
"""Rows of the tallest product, and columns of every tensor of sums."""

_LINE_BYTES = 128
_SMS = 132  # of an H100 and an H200
_FEWEST_ROWS = 8  # that the matrix unit multiplies
_NO_UPDATES = UpdateLaunch(None)
_LEAST_SLOTS = 64  # sums are read as one block of at least this many parts: their number may vary


@dataclass(frozen=True)
class ProductLaunch:
    """Memory and options that the products of one stream share; `ProductLaunch.on` makes one.

    partials float32 and tickets int32 serve products whose k is split; tickets are zero between kernels.
    pdl: programmatic dependent launch, for streams in which every kernel so launched waits before it touches
    what others may. compile_only: kernels are compiled and not run. exact: a row's bits do not depend on how
    many rows there are: k is cut by the weight alone, sums of squares are taken over fixed groups of columns
    in one order, and no multiplication is fused with an addition. It holds for types of 16 bits; float32
    products have no order of their own. cublas: exact products of more rows are cuBLAS's, which has been
    found to give the same bits. packed: exact products read numbers of four bits as they are packed, which
    has been found to give the bits of the matrix that they mean. sms: of the GPU.
    """

    partials: torch.Tensor
    tickets: torch.Tensor
    pdl: bool
    compile_only: bool = False
    exact: bool = False
    cublas: bool = False
    packed: bool = True
    sms: int = _SMS
    tiles: Table = field(default_factory=lambda: {**MEASURED, **MEASURED_INT4})

    @classmethod
    def on(cls, device: str, pdl: bool, exact: bool = False) -> ProductLaunch:
        """Allocates the scratch memory on `device`."""
        partials = torch.empty(MOST_SHARES * MAX_ROWS, dtype=torch.float32, device=device)
        tickets = torch.zeros(MOST_SHARES, dtype=torch.int32, device=device)
        sms = _SMS
        if partials.is_cuda:
            sms = torch.cuda.get_device_properties(partials.device).multi_processor_count
        return cls(partials, tickets, pdl, exact=exact, sms=sms, tiles=tiles_of(device))


def adapters_of(slots: torch.Tensor) -> AdapterRows:
    """Those of rows with slots int32 [m]; 0: a row has none."""
    m = len(slots)
    return (FewAdapters if m <= FEW else AdapterGroups if m <= MAX_ROWS else AdapterBlocks)(slots)


def tiles_of(device: str) -> Table:
    """All tiles that were measured, of this machine's cache too. In exact arithmetic they change no bit."""
    return {**MEASURED_INT4, **PACKED_TILES.measured(device), **MEASURED}


@dataclass(frozen=True)
class LinearEnd:
    """The rest of `linear` behind its product: `bias` [n] and `residual` [m, n] are added; `sums`, float32
    [linear_parts(...), 128], receives for each tile of columns (exact: group of them) the rows' sums of
    squares (of what was rounded); `gained` [m, n] receives the rows times `gain` [n], rounded again.
    `updates`: what adapters add, before all else.
    """

    residual: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    gained: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    updates: Updates | None = None

    def check(self, m: int, plan: ProductPlan) -> None:
        """Raises ValueError for shapes that do not fit."""
        for name, tensor in (("residual", self.residual), ("gained", self.gained)):
            if tensor is not None:
                _expect(name, tensor, m, plan.n)
        if self.sums is not None:
            _expect("sums", self.sums, plan.n // plan.group, MAX_ROWS)
        for name, tensor in (("gain", self.gain), ("bias", self.bias)):
            if tensor is not None:
                _expect(name, tensor, plan.n)


SkinnyWeight = torch.Tensor | PackedWeight
"""A matrix [n, k]: its numbers, or packed ones."""


@dataclass(frozen=True)
class SkinnyInput:
    """Rows x [m, k], m <= 128. With `sums`, float32 [parts, 128] of squares: RMS-normalised, no gain."""

    x: torch.Tensor
    sums: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class HeadNorms:
    """Gains [2, head_dim] of the RMSNorm that each head of q, and of k, passes before it is rotated."""

    gains: torch.Tensor
    eps: float


@dataclass(frozen=True)
class QkvWeights:
    """weight [(heads + 2 kv_heads) * head_dim, k] of q, k and v, their bias [rows of the weight], if there is
    one, what the heads pass before they are rotated, and what adapters add.
    """

    weight: SkinnyWeight
    bias: torch.Tensor | None = None
    norms: HeadNorms | None = None
    updates: Updates | None = None


@dataclass(frozen=True)
class RotaryInput:
    """cos and sin float32 [length, head_dim / 2], and each row's position, int32 or int64 [m]."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class KvRows:
    """One layer of a pool, [pages, 2, page_size, kv_heads, head_dim], and each row's place in it.

    rows, int32 or int64 [m]: page * page_size + slot, or -1 for a row that is not kept. Keys and values in
    FP8 have their scales behind these rows of each page.
    """

    layer: torch.Tensor
    rows: torch.Tensor

    @property
    def scaled(self) -> bool:
        """True if heads are stored with scales."""
        return self.layer.dtype is torch.float8_e4m3fn


def qkv_kind(normed: bool, scaled: bool) -> str:
    """The kind of the product of q, k and v, as of `skinny_tiles.ProductShape`: whether its tiles are heads,
    since those are normalised, or stored with scales.
    """
    return "heads" if normed or scaled else "qkv"


def empty_padded(m: int, *sizes: int, like: torch.Tensor) -> torch.Tensor:
    """An empty [m, *sizes] that products read fast: behind it is memory for all rows of the padding."""
    return like.new_empty(_padded(m) if m <= MAX_ROWS else m, *sizes)[:m]


def linear(
    source: SkinnyInput,
    weight: SkinnyWeight,
    out: torch.Tensor,
    launch: ProductLaunch,
    end: LinearEnd | None = None,
) -> None:
    """out [m, n] = source . weight [n, k]^T (+ residual [m, n]), rounded once to out's dtype.

    `out` may be the residual of `end`. Raises ValueError for shapes that do not fit.
    """
    plan, end = _plan("linear", source, weight, weight.shape[0], launch), end or LinearEnd()
    _expect("out", out, source.x.shape[0], plan.n)
    end.check(source.x.shape[0], plan)
    plan, updates = _with_updates(plan, end.updates, launch, by_parts=False)
    read = _read(source.x, weight, plan, (1, 1), [plan.columns])
    ends = (end.residual, end.bias, source.sums, end.sums, end.gain, end.gained, updates.tensors)
    args = (*read, out, *ends, launch.partials, launch.tickets)
    _start(linear_kernel, plan, (*args, *_counts(source)), launch, updates)


def linear_parts(source: SkinnyInput, weight: SkinnyWeight, launch: ProductLaunch) -> int:
    """The number of parts that `linear`, called with these, leaves of each row's sum of squares."""
    plan = _plan("linear", source, weight, weight.shape[0], launch)
    return plan.n // plan.group


def sum_group(width: int) -> int:
    """Columns of each sum of squares that the exact arithmetic leaves of rows of that width."""
    return math.gcd(SUM_GROUP, width)


def gated(
    source: SkinnyInput,
    weight: SkinnyWeight,
    out: torch.Tensor,
    launch: ProductLaunch,
    gelu: bool = False,
    updates: Updates | None = None,
) -> None:
    """out [m, inner] = silu(gate) * up in float32, where [gate, up] = source . weight [2 inner, k]^T.

    `gelu`: the gate passes GELU, in its tanh form, instead of SiLU. `updates`: what adapters add to both.
    """
    plan = replace(_plan("gated", source, weight, weight.shape[0], launch), gelu=gelu)
    _expect("out", out, source.x.shape[0], plan.n // 2)
    plan, added = _with_updates(plan, updates, launch)
    read = _read(source.x, weight, plan, (1, 2), [plan.half])
    args = (*read, out, source.sums, added.tensors, launch.partials, launch.tickets)
    _start(gated_kernel, plan, (*args, *_counts(source)), launch, added)


def qkv_rope(
    source: SkinnyInput,
    qkv: QkvWeights,
    q_out: torch.Tensor,
    rotation: RotaryInput,
    kv: KvRows,
    launch: ProductLaunch,
) -> None:
    """Queries to q_out [m, heads, head_dim] and keys to the pool, both rotated; values to the pool.

    The rotation pairs element i of a head with i + head_dim / 2, in float32. Raises ValueError for shapes
    that do not fit.
    """
    _, _, page_size, kv_heads, dim = kv.layer.shape
    weight, norms = qkv.weight, qkv.norms
    heads = FusedHeads(
        q_out.shape[1], kv_heads, dim, page_size, kv.layer.stride(0), norms.eps if norms else 0.0
    )
    if weight.shape[0] != (heads.q + 2 * heads.kv) * dim or not kv.layer[0].is_contiguous():
        raise ValueError(f"weight {tuple(weight.shape)} or layer {kv.layer.stride()} does not suit {heads}")
    plan = _plan(qkv_kind(norms is not None, kv.scaled), source, weight, dim, launch)
    _expect("q_out", q_out, source.x.shape[0], heads.q, dim)
    if qkv.bias is not None:
        _expect("bias", qkv.bias, plan.n)
    if norms is not None:
        _expect("gains", norms.gains, 2, dim)
    plan, updates = _with_updates(plan, qkv.updates, launch)
    read = _read(source.x, weight, plan, (plan.n // dim, 2), [1, 2, plan.half])
    gains = None if norms is None else norms.gains
    inputs = (*read, qkv.bias, gains, updates.tensors, q_out, kv.layer, rotation.cos, rotation.sin)
    rows = (rotation.positions, kv.rows, source.sums, launch.partials, launch.tickets)
    _start(qkv_rope_kernel, plan, (*inputs, *rows, *_counts(source), heads), launch, updates)


def _plan(
    kind: str, source: SkinnyInput, weight: SkinnyWeight, span: int, launch: ProductLaunch
) -> ProductPlan:
    """Plans this product; a tile's columns divide `span`."""
    (m, k), (n, width) = source.x.shape, weight.shape
    if not 0 < m <= MAX_ROWS or width != k:
        raise ValueError(f"no skinny product of {tuple(source.x.shape)} and {tuple(weight.shape)}")
    stored = weight.words if isinstance(weight, PackedWeight) else weight
    if not (source.x.is_contiguous() and stored.is_contiguous()):
        raise ValueError("x and weight must be contiguous")
    itemsize, parts = source.x.element_size(), 0 if source.sums is None else source.sums.shape[0]
    shape, step, scaled = ProductShape(kind, _padded(m), n, k, span), PackedStep(), 0
    if isinstance(weight, PackedWeight):
        if source.x.dtype != weight.dtype:
            raise ValueError(f"no product of packed {weight.dtype} with {source.x.dtype}")
        step, scaled = weight.step, weight.together
        if m <= _FEWEST_ROWS and not launch.exact:
            shape = replace(shape, rows=_FEWEST_ROWS)
        tile = packed_tile_for(shape, step, itemsize, launch.tiles, exact=launch.exact)
        if launch.exact and not weight.is_exact(tile.split):
            raise ValueError(f"no exact product of {tuple(weight.shape)} in {tile.split} stretches")
    else:
        tile = (exact_tile_for if launch.exact else tile_for)(shape, itemsize, launch.tiles)
    return ProductPlan(
        rows=shape.rows,
        n=n,
        k=k,
        columns=tile.columns,
        depth=tile.depth,
        split=tile.split,
        warps=tile.warps,
        stages=tile.stages,
        slots=max(_LEAST_SLOTS, power_of_2(parts)) if parts else 0,
        eps=source.eps,
        pdl=launch.pdl,
        ahead=tile.ahead * stored.element_size() // _LINE_BYTES,
        line=_LINE_BYTES // stored.element_size(),
        folds=tile.folds,
        group=sum_group(n) if launch.exact else tile.columns,
        exact=launch.exact,
        form=step.form,
        unit=step.unit,
        parts=step.parts,
        scaled=scaled,
        shares_k=tile.shares_k,
    )


def _with_updates(
    plan: ProductPlan, updates: Updates | None, launch: ProductLaunch, *, by_parts: bool = True
) -> tuple[ProductPlan, UpdateLaunch]:
    """The plan with what adapters add, and what is launched beside the product for that. `by_parts`: a tile
    has one part.
    """
    if updates is None:
        return plan, _NO_UPDATES
    if isinstance(updates, GroupUpdates):
        return replace(plan, added=True), UpdateLaunch(updates.beside(plan.pdl))
    assert not isinstance(updates, BlockUpdates)  # of more rows
    site, mixed = updates.site, updates.site.parts > 1 and not by_parts
    plan = replace(plan, updated=site.parts, ranks=site.ranks, stride=site.places.stride(0), mixed=mixed)
    if isinstance(updates, RowUpdates):
        return plan, UpdateLaunch(updates.tensors)
    if not mixed and len(updates.x) <= MOST_BEHIND:
        plan = _going_first(plan, launch)
    if plan.first:
        return plan, updates.beside(plan.pdl, plan.programs)
    return plan, UpdateLaunch(updates.before(plan.pdl).tensors)


def _going_first(plan: ProductPlan, launch: ProductLaunch) -> ProductPlan:
    """The plan of a product that is launched before the kernel of its updates, where the GPU has room for all
    of its programs and some others, since that one begins behind the begin of all; else as it is.
    """
    shorter = replace(plan, depth=plan.depth // 2)
    for made in (plan,) if plan.unit else (plan, shorter):
        if launch.pdl and plan.programs < made.programs_of_sm * launch.sms:
            return replace(made, first=True)
    return plan


def _padded(m: int) -> int:
    return max(16, power_of_2(m))


def _read(
    x: torch.Tensor, weight: SkinnyWeight, plan: ProductPlan, heads: tuple[int, int], block: list[int]
) -> tuple[Any, ...]:
    """x; the weight, where it begins and by blocks; and what multiplies packed numbers.

    `heads`: into how many parts its rows are cut, and each of those again. `block`: of a tile's rows.
    """
    if isinstance(weight, PackedWeight):
        parts = weight.words.view(*heads, -1, plan.stored)
        blocks = _blocks(parts, [1, heads[1], block[-1]], plan.unit * plan.together)
        return _rows(x, plan, plan.step_of_rows), weight.words, blocks, weight.scales, weight.beside
    parts = weight.view(*heads, -1, plan.k) if len(block) > 1 else weight
    return _rows(x, plan, plan.depth), weight, _blocks(parts, block, plan.depth), None, None


def _rows(x: torch.Tensor, plan: ProductPlan, depth: int) -> TensorDescriptor:
    """x by steps of its columns. Rows beyond m are read as they are where memory goes on, else as zeros.

    The products leave them out either way; that zeros need no memory makes them slower.
    """
    behind = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    rows = plan.rows if behind >= plan.rows * plan.k else x.shape[0]
    return TensorDescriptor(x, [rows, plan.k], [plan.k, 1], [plan.rows, depth])


def _blocks(weight: torch.Tensor, sizes: list[int], depth: int) -> TensorDescriptor:
    """The weight [..., k] by blocks of its rows and steps of its columns."""
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [*sizes, depth])


def _expect(name: str, tensor: torch.Tensor, *sizes: int) -> None:
    """The kernels check nothing: a wrong shape would be written beyond its end."""
    if tensor.shape != sizes or not tensor.is_contiguous():
        raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.stride()} should be {sizes}, contiguous")


def _counts(source: SkinnyInput) -> tuple[int, int]:
    """m, and the parts of its sums."""
    return source.x.shape[0], 0 if source.sums is None else source.sums.shape[0]


def _start(
    kernel: Any, plan: ProductPlan, args: tuple[Any, ...], launch: ProductLaunch, updates: UpdateLaunch
) -> None:
    grid = (plan.n // plan.columns, plan.split)
    options = {"num_warps": plan.warps, "num_stages": plan.stages, "launch_pdl": plan.pdl}
    if plan.exact:
        options["enable_fp_fusion"] = False
    if launch.compile_only:
        kernel.warmup(*args, plan, grid=grid, **options)
    else:
        kernel[grid](*args, plan, **options)
    updates.launch()
