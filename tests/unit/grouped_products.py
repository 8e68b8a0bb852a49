"""Products over groups of rows: inputs of each kind of numbers, and plain torch's results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from eyas.engine.checkpoint.fp8 import RowRounding, widened
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.skinny import ProductLaunch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = COMPILED = torch.cuda.is_available() and not triton.knobs.runtime.interpret
CLOSE = 2e-6  # float32 sums
CLOSE_IN_FP8 = 2.0**-10 if COMPILED else CLOSE
"""Hopper's matrix unit cuts the sum of 32 products in FP8 13 bits behind the point of the largest, towards
zero; a sum of 128, which is then added up in float32, is cut four times and leans to one side.
"""


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def as_blocks(weight: torch.Tensor, powers: bool = False) -> StoredWeight:
    """[..., n, k], rounded block by block."""
    n, k = weight.shape[-2:]
    padded = F.pad(weight, (0, -k % 128, 0, -n % 128))
    cut = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))  # [..., n / 128, 128, k / 128, 128]
    scales = cut.abs().amax((-3, -1)) / 448.0
    if powers:
        scales = torch.exp2(scales.log2().ceil())
    stored = (cut / scales[..., :, None, :, None]).to(torch.float8_e4m3fn).flatten(-4, -3).flatten(-2)
    return StoredWeight(
        stored[..., :n, :k].contiguous().to(DEVICE),
        scales.contiguous().to(DEVICE),
        RowRounding("block", powers),
    )


def as_channels(weight: torch.Tensor, rounding: RowRounding) -> StoredWeight:
    """[..., n, k], rounded row by row."""
    scales = weight.abs().amax(-1) / 448.0
    stored = (weight / scales[..., None]).to(torch.float8_e4m3fn)
    return StoredWeight(stored.to(DEVICE), scales.to(DEVICE), rounding)


def in_kind(weight: torch.Tensor, kind: str) -> StoredWeight:
    if kind == "float32":
        return StoredWeight(weight.to(DEVICE))
    if kind in ("blocks", "powers"):
        return as_blocks(weight, kind == "powers")
    return as_channels(weight, RowRounding(kind, scale=0.01))  # type: ignore[arg-type]


def meant(weight: StoredWeight) -> torch.Tensor:
    """What a weight stands for, float64."""
    if weight.scales is None:
        return weight.stored.double().cpu()
    stored, scales = weight.stored.cpu(), weight.scales.cpu()
    if stored.dim() == 2:
        return widened(stored, scales).double()
    return torch.stack([widened(*pair) for pair in zip(stored, scales, strict=True)]).double()


def rounded(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Rows as a product with this weight reads them, float64."""
    if weight.rounding is None:
        return x.double()
    if weight.rounding.rows != "block":
        largest = x.abs().amax(1, keepdim=True).clamp(min=1e-4)
        scale = largest / 448.0 if weight.rounding.rows == "token" else torch.tensor(weight.rounding.scale)
        return ((x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale).double()
    padded = F.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scales = padded.abs().amax(2, keepdim=True).clamp(min=1e-4) / 448.0
    if weight.rounding.powers:
        scales = torch.exp2(scales.log2().ceil())
    return ((padded / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)[:, : x.shape[1]].double()


def act(y: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def close(found: torch.Tensor, expected: torch.Tensor, kind: str) -> None:
    """`kind`: of the weight."""
    error = (found.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < (CLOSE if kind == "float32" else CLOSE_IN_FP8), error.max()


def products(
    tile: GroupedTile | None = None, *uses: tuple[StoredWeight, GateActivation | None, int]
) -> GroupedProducts:
    """With this tile for these products."""
    table = {key_of(shape_of(weight, gate), choices): tile for weight, gate, choices in uses if tile}
    return GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL), table)


def computed(
    x: torch.Tensor, experts: torch.Tensor, weights: tuple[StoredWeight, StoredWeight]
) -> list[torch.Tensor]:
    """What `gate_up` gives, by choice, and `down` of that: each row by each of its experts, one by one."""
    pairs = [(row, e) for row, chosen in enumerate(experts.tolist()) for e in chosen]
    first, second = (meant(weight) for weight in weights)
    rows = rounded(x.cpu(), weights[0])
    inner = torch.stack([act(rows[row] @ first[e].t()) for row, e in pairs])
    read = rounded(inner.float(), weights[1])
    return [inner, torch.stack([read[i] @ second[e].t() for i, (_, e) in enumerate(pairs)])]
