"""The compiler takes what adapters add to products, for Hopper: nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products import skinny, updates
from tests.unit.fenced import unfenced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

K, HEADS, KV, DIM = 256, 4, 2, 64


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def site(parts: int, n: int) -> updates.SiteNumbers:
    places = empty(5, 3, 2, dtype=torch.int64)[:, 1]
    return updates.SiteNumbers(empty(4096), places, empty(n, dtype=torch.int32), parts, 32)


def launches() -> None:
    """Every kernel that has updates in it, of few rows and of many, fast and exact."""
    for exact in (False, True):
        launch = skinny.ProductLaunch.on("meta", pdl=True, exact=exact)
        for m in (1, 20, 40):
            products(m, launch)
        for m in (1, 20, 40, 300):
            updates_of(empty(m, K), site(2, 64), exact).add_to(empty(m, 64), True)


def updates_of(x: torch.Tensor, numbers: updates.SiteNumbers, exact: bool) -> skinny.Updates:
    """As a step makes them."""
    slots = empty(len(x), dtype=torch.int32)
    if exact:
        return updates.shrunk(x, slots, numbers, True, exact)
    return skinny.adapters_of(slots).updates(x, numbers)


def products(m: int, launch: skinny.ProductLaunch) -> None:
    """The three of few rows."""

    x, sums = skinny.empty_padded(m, K, like=empty(1)), empty(4, skinny.MAX_ROWS, dtype=torch.float32)

    def row_updates(parts: int, n: int) -> skinny.Updates:
        return updates_of(x, site(parts, n), launch.exact)

    source, rows = skinny.SkinnyInput(x, sums, 1e-5), (HEADS + 2 * KV) * DIM
    for parts in (1, 2):
        out = skinny.empty_padded(m, K, like=x)
        skinny.linear(source, empty(K, K), out, launch, skinny.LinearEnd(out, updates=row_updates(parts, K)))
    inner = skinny.empty_padded(m, 128, like=x)
    skinny.gated(source, empty(256, K), inner, launch, updates=row_updates(2, 256))
    angles, places = empty(64, DIM // 2, dtype=torch.float32), empty(m, dtype=torch.int32)
    weights = skinny.QkvWeights(empty(rows, K), updates=row_updates(3, rows))
    q = skinny.empty_padded(m, HEADS, DIM, like=x)
    rotation = skinny.RotaryInput(angles, angles, places)
    skinny.qkv_rope(source, weights, q, rotation, skinny.KvRows(empty(4, 2, 16, KV, DIM), places), launch)


def test_kernels_with_updates_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    report = KernelWarmup("tests.unit.test_updates_code:launches", (), 90, 2).wait()
    assert report.kernels >= 20
    found = [path.read_text() for path in tmp_path.rglob("*.ttgir")]
    assert len(found) >= 20 and not [line for code in found for line in unfenced(code)]
