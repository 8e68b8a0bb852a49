"""The row kernels against torch: roundings, widths that are no powers of two, rows that are not kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kernels.products import rows
from eyas.engine.kernels.products.skinny import MAX_ROWS, HeadNorms, KvRows, RotaryInput
from eyas.engine.layers.rotary import Rotary, tables

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-2  # large, so that a forgotten epsilon shows
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":  # the interpreter cuts bfloat16 off where it should round
    DTYPES.append(torch.bfloat16)
PAGE = 4
LAYER = 1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a last place or two: sums are taken in another order."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    step = 4 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "width"), [(1, 64), (5, 96), (3, 1024)])
@pytest.mark.parametrize("gained", [False, True])
def test_norm_is_torchs(m: int, width: int, dtype: torch.dtype, gained: bool) -> None:
    x, gain = random(m, width, dtype=dtype), random(width, dtype=dtype) if gained else None
    before = x.clone()
    close(rows.norm(x, EPS, gain), F.rms_norm(x, (width,), gain, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "width"), [(4, 96), (2, 1024)])
def test_the_sum_is_rounded_before_it_is_normalised(m: int, width: int, dtype: torch.dtype) -> None:
    x, residual, gain = (random(*sizes, dtype=dtype) for sizes in ((m, width), (m, width), (width,)))
    expected = x + residual
    for given in (None, gain):
        added = residual.clone()
        normed = rows.add_norm(x, added, rows.NormInput(EPS, given)).plain
        assert torch.equal(added, expected)
        close(normed, F.rms_norm(expected, (width,), given, EPS))


def test_the_norm_is_that_of_the_rounded_sum() -> None:
    """To the bit, but for sums taken in another order: what rounding took away must not come back."""
    x, residual = (random(8, 512, dtype=torch.float16) for _ in range(2))
    rounded = (x + residual).double()
    expected = (rounded / (rounded.square().mean(1, keepdim=True) + EPS).sqrt()).half()
    assert (rows.add_norm(x, residual, rows.NormInput(EPS)).plain == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "width"), [(4, 96), (2, 1024)])
@pytest.mark.parametrize("gain_dtype", [torch.float32, None])
def test_what_is_added_may_be_normalised_first(
    m: int, width: int, dtype: torch.dtype, gain_dtype: torch.dtype | None
) -> None:
    """Rounded as by a kernel of its own; gains may have more precision than rows."""
    x, residual, gain = (random(*sizes, dtype=dtype) for sizes in ((m, width), (m, width), (width,)))
    post = random(width, dtype=gain_dtype or dtype)
    expected = residual + (F.rms_norm(x.float(), (width,), post.float(), EPS)).to(dtype)
    assert (expected - residual - x).abs().max() > 0.1, "norm and gain change nothing"
    wide, narrow = residual.clone(), residual.clone()
    close(
        rows.add_norm(x, wide, rows.NormInput(EPS, gain), post).plain,
        F.rms_norm(expected, (width,), gain, EPS),
    )
    close(wide, expected)
    sums = rows.add_normed(x, narrow, post, EPS)
    assert torch.equal(narrow, wide) and sums.shape == (1, MAX_ROWS)
    torch.testing.assert_close(sums[0, :m], wide.float().square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_are_gathered(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    source = random(9, 48, dtype=dtype)
    index = torch.tensor([8, 0, 3, 3], dtype=index_dtype, device=DEVICE)
    assert torch.equal(rows.gather_rows(source, index), source[index.long()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_put_beside_others(dtype: torch.dtype) -> None:
    x, out = random(5, 48, dtype=dtype), random(7, 3, 48, dtype=dtype)
    expected = out.clone()
    expected[:5, 1] = x
    rows.put_rows(x, out, 1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_leaves_sums_of_squares(dtype: torch.dtype) -> None:
    table = random(20, 96, dtype=dtype)
    tokens = torch.tensor([19, 0, 7, 7, 2], dtype=torch.int32, device=DEVICE)
    plain, nothing = rows.embed(tokens, table)
    out, sums = rows.embed(tokens, table, sums=True)
    assert nothing is None and sums is not None and sums.shape == (1, MAX_ROWS)
    assert torch.equal(out, table[tokens.long()]) and torch.equal(plain, out)
    torch.testing.assert_close(sums[0, :5], out.float().square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_scales_in_the_tables_precision(dtype: torch.dtype) -> None:
    table, scale = random(20, 96, dtype=dtype), 33.7
    tokens = torch.tensor([19, 0, 7], dtype=torch.int32, device=DEVICE)
    expected = table[tokens.long()] * torch.tensor(scale, device=DEVICE).to(dtype)
    out, sums = rows.embed(tokens, table, sums=True, scale=scale)
    assert torch.equal(out, expected) and sums is not None
    torch.testing.assert_close(sums[0, :3], out.float().square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "inner"), [(1, 48), (3, 1040)])
@pytest.mark.parametrize("gelu", [False, True])
def test_act_mul(m: int, inner: int, dtype: torch.dtype, gelu: bool) -> None:
    gate_up = random(m, 2 * inner, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=1)  # in float32 torch's tanh loses the small ones
    passed = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    close(rows.act_mul(gate_up, gelu), (passed * up).to(dtype))


def test_gates_far_out_are_finite() -> None:
    gate_up = torch.tensor([[-1e4, -300.0, 300.0, 1e4, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for gelu in (False, True):
        assert rows.act_mul(gate_up, gelu).tolist() == [[0.0, 0.0, 300.0, 1e4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_rows(dtype: torch.dtype) -> None:
    """Gates that stand behind something else, and are far out."""
    x, made = random(3, 1030, dtype=dtype), random(3, 1500, dtype=dtype) * 60
    gates = made[:, 470:]
    expected = (x.float() * gates.float().sigmoid()).to(dtype)
    found = rows.gate_rows(x, gates)
    assert found is x
    close(found, expected)


def rotated(x: torch.Tensor, positions: torch.Tensor, rope: RopeConfig, dim: int) -> torch.Tensor:
    rotary = Rotary(rope, dim, 64)
    return rotary.rotate(x.cpu(), rotary.angles(positions.cpu().long())).to(x.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 32), (3, 1, 64), (14, 2, 16), (12, 12, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool) -> None:
    m, rope = 4, RopeConfig(theta=100.0)
    columns = (heads + 2 * kv_heads) * dim
    qkv = random(m, columns + 16 * normed, dtype=dtype)[:, :columns]  # perhaps with something behind
    pool = torch.full((6, 3, 2, PAGE, kv_heads, dim), 7.0, device=DEVICE).to(dtype)
    positions = torch.tensor([0, 63, 5, 17], dtype=torch.int32, device=DEVICE)
    kv_rows = torch.tensor([23, -1, 0, 9], dtype=torch.int32, device=DEVICE)
    cos, sin = (t.to(DEVICE) for t in tables(rope, dim, 64))
    q = torch.empty(m, heads, dim, dtype=dtype, device=DEVICE)
    gains = random(2, dim, dtype=dtype) if normed else (None, None)
    norms = HeadNorms(gains, EPS) if normed else None
    place, layout = KvRows(pool[:, LAYER], kv_rows), rows.HeadLayout(heads, kv_heads, dim, norms)
    rows.rope_write(qkv, layout, q, RotaryInput(cos, sin, positions), place)
    all_heads = qkv.reshape(m, -1, dim)
    parts = list(all_heads.split([heads, kv_heads, kv_heads], dim=1))
    for i, gain in enumerate(gains):
        if gain is not None:
            parts[i] = F.rms_norm(parts[i], (dim,), gain, EPS)
    close(q, rotated(parts[0], positions, rope, dim))
    expected = torch.full_like(pool, 7.0)
    keys = rotated(parts[1], positions, rope, dim)
    for row, at in enumerate(kv_rows.tolist()):
        if at >= 0:
            expected[at // PAGE, LAYER, 0, at % PAGE] = keys[row]
            expected[at // PAGE, LAYER, 1, at % PAGE] = parts[2][row]
    close(pool, expected)
    untouched = expected == 7.0
    assert torch.equal(pool[untouched], expected[untouched])
    assert torch.equal(pool[:, LAYER, 1], expected[:, LAYER, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_that_the_product_left_out(dtype: torch.dtype) -> None:
    """As one that it added; a compiler may fuse what follows in another way."""
    heads, kv_heads, dim = 3, 2, 48
    qkv, bias = random(2, 7 * dim, dtype=dtype), random(7 * dim, dtype=dtype)
    cos, sin = (t.to(DEVICE) for t in tables(RopeConfig(theta=100.0), dim, 64))
    rotation = RotaryInput(cos, sin, torch.tensor([63, 5], dtype=torch.int32, device=DEVICE))
    norms = HeadNorms(random(2, dim, dtype=dtype), EPS)

    def written(x: torch.Tensor, left: torch.Tensor | None) -> list[torch.Tensor]:
        pool = torch.zeros(6, 2, PAGE, kv_heads, dim, dtype=dtype, device=DEVICE)
        q = torch.empty(2, heads, dim, dtype=dtype, device=DEVICE)
        place = KvRows(pool, torch.tensor([9, 0], dtype=torch.int32, device=DEVICE))
        rows.rope_write(x, rows.HeadLayout(heads, kv_heads, dim, norms, left), q, rotation, place)
        return [q, pool]

    for found, expected in zip(written(qkv, bias), written(qkv + bias, None), strict=True):
        close(found, expected)
    assert not torch.equal(written(qkv, bias.roll(dim))[1], written(qkv + bias, None)[1])
