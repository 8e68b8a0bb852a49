"""Prompt attention by dense products: pages read into one place, parts of keys joined; cuDNN by torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eyas.common.errors import ConfigError
from eyas.engine.attention import cudnn_backend
from eyas.engine.attention.cudnn_backend import CudnnAttention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kernels.attention.joined import join, rows_of_pages
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape
from tests.unit.prompt_attention import DIM, HEADS, KV, PAGE, SCALE, SHAPES, UNIT, Rig, plain


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cudnn_backend, "UNIT", UNIT)
    monkeypatch.setattr(cudnn_backend, "FEWEST", 7)
    monkeypatch.setattr(cudnn_backend, "LEAST", 5)
    SHAPES.clear()
    yield


@pytest.mark.parametrize(
    "spans", [[(0, 16)], [(0, 5), (24, 9)], [(3, 7)], [(43, 22), (8, 8), (0, 11)], [(56, 40)]]
)
def test_chunks(spans: list[tuple[int, int]]) -> None:
    """With and without rows before them, which end within a unit and a page, beside one another."""
    rig = Rig(spans)
    assert (rig.made() - rig.expected()).abs().max() < 1e-5
    assert any(causal for _, _, causal in SHAPES)
    assert any(not causal for _, _, causal in SHAPES) == any(start >= UNIT for start, _ in spans)


@pytest.mark.parametrize("broken", ["a stretch is left out", "sums are those of the last part"])
def test_what_is_left_out_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "a stretch is left out":
        monkeypatch.setattr(cudnn_backend, "_stretches", lambda rows: [slice(0, UNIT)])
    else:
        monkeypatch.setattr(cudnn_backend, "join", lambda a, b, out: join(a, (b[0], a[1]), out))
    rig = Rig([(43, 22)])
    assert (rig.made() - rig.expected()).abs().max() > 1e-3


def test_short_chunks_are_left_to_others() -> None:
    rig = Rig([(8, 16), (0, 4)])
    shape = PoolShape(KvFormat(2, KV, DIM), len(rig.layer), PAGE)
    assert not CudnnAttention(shape, SCALE, plain).plan(rig.spans)
    assert CudnnAttention(shape, SCALE, plain).plan(rig.spans[:1])
    few = [QuerySpan(rig.spans[0].pages, 8, 6)]
    assert not CudnnAttention(shape, SCALE, plain).plan(few)
    assert CudnnAttention(shape, SCALE, plain).plan(rig.spans[:1] + few)


def test_a_sequence_that_one_place_has_no_room_for_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads its keys and values of a layer there: of a million tokens that is gigabytes."""
    rig = Rig([(8, 16)])
    shape = PoolShape(KvFormat(2, KV, DIM), len(rig.layer), PAGE)
    for bytes_left, taken in ((0, True), (-1, False)):
        most = 24 * 2 * KV * DIM * 4 + bytes_left
        monkeypatch.setattr(cudnn_backend, "MOST_BYTES", most)
        assert CudnnAttention(shape, SCALE, plain).plan(rig.spans) is taken


def test_rows_behind_the_end_are_zero() -> None:
    rig = Rig([(3, 7)])
    pages = torch.tensor(rig.spans[0].pages, dtype=torch.int32)
    made = rows_of_pages(rig.layer, pages, 10, 16)
    assert torch.equal(made[:, :10], rig.keys[0]) and not made[:, 10:].any()


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 128), (torch.bfloat16, 80)])
def test_heads_that_cudnn_has_not_are_refused(dtype: torch.dtype, dim: int) -> None:
    with pytest.raises(ConfigError, match="--prefill-attention-backend triton"):
        CudnnAttention(PoolShape(KvFormat(1, 1, dim), 1, PAGE, dtype, "meta"), SCALE)


def test_a_start_makes_the_shapes_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its first four chunks: none of them waits for a plan."""
    monkeypatch.setattr(cudnn_backend, "FEWEST", 16)
    shape = PoolShape(KvFormat(1, KV, DIM), 40, PAGE)
    layer, q = torch.randn(40, 2, PAGE, KV, DIM), torch.randn(16, HEADS, DIM)
    attention = CudnnAttention(shape, SCALE, plain)
    assert attention.made_up(15) == []
    for spans in (
        attention.made_up(16),
        *([QuerySpan([*range(16)], start, 16)] for start in (0, 16, 32, 48)),
    ):
        before, _ = set(SHAPES), attention.plan(spans)
        attention.run(q, layer, torch.empty_like(q))
        assert not before or set(SHAPES) == before
