"""Every kernel of states compiles for Hopper, fits a multiprocessor, and reads nothing that Triton's copies
ahead have overwritten, nor what no fence has shown to the matrix unit. Nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.kernels.drafts.rounds import FACTS, RoundBatch, RoundVerdicts
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.states import prompts as prompt_kernels
from eyas.engine.kernels.states.accepted import keep_path
from eyas.engine.kernels.states.by_row import recur_by_row
from eyas.engine.kernels.states.few import recur_few
from eyas.engine.kernels.states.groups import decoded
from eyas.engine.kernels.states.order import DeltaLayer, SolvedRows, apart, parts_of
from eyas.engine.kernels.states.prompts import Chunks, recur_chunks
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.kernels.states.short import convolve
from eyas.engine.states.convolution import ShortConvolution
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.rows import StateGroups, StateRows
from eyas.engine.states.shape import ChannelShape, ConvolutionShape, DeltaShape, SpaceShape, ring_rows
from eyas.engine.states.store import StateFormat, StateStore
from tests.unit.fenced import unfenced
from tests.unit.pipelined import late_reads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = DeltaShape(16, 32, 128, 128, 4)  # of Qwen3-Next-80B-A3B
SHARED_BYTES = 227 * 1024


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def int32(*sizes: int) -> torch.Tensor:
    return empty(*sizes, dtype=torch.int32)


def few() -> None:
    """Single rows, chains and trees."""
    for most, tree in ((1, False), (4, False), (8, True), (64, True)):
        recur_few(*_given(2 * most, most, trees=tree), _room(2 * most), pdl=True)


def prompts(dtype: torch.dtype = torch.bfloat16) -> None:
    recur_chunks(*_given(256, 256, dtype), Chunks(int32(6, 2), int32(2)), _room(256, dtype=dtype))


def space() -> None:
    """Mamba-2 in the sizes of Bamba-9B, few rows and prompts."""
    shape = SpaceShape(1, 128, 256, 64, 4)
    recur_few(*_given(2, 1, shape=shape), _room(2, shape), pdl=True)
    recur_few(*_given(16, 8, shape=shape, trees=True), _room(16, shape), pdl=True)
    recur_chunks(*_given(256, 256, shape=shape), Chunks(int32(6, 2), int32(2)), _room(256, shape))


def channels() -> None:
    """Kimi Delta Attention in the sizes of Kimi-Linear-48B-A3B, chains and trees."""
    for trees in (False, True):
        given = _given(8, 4, shape=ChannelShape(32, 32, 128, 128, 4), trees=trees)
        recur_by_row(*given, empty(8, 32 * 128), pdl=True)


def float32() -> None:
    """Prompts: the tensor cores do not multiply these."""
    prompts(torch.float32)


def path() -> None:
    """Rows of an accepted path move."""
    format = StateFormat((0, 1), SHAPE, ring_rows(16), torch.bfloat16)
    states = StateStore(format, empty(2, format.slot_bytes, dtype=torch.uint8))
    batch = RoundBatch(SlotTables(TableSizes(slots=3, max_pages=4, width=16), "meta"), int32(2), 16, pdl=True)
    keep_path(batch, RoundVerdicts(int32(2, FACTS + 16), int32(2, 6)), states, SolvedStore.on(states))
    decoded(batch.tables, int32(2), 16, 0, int32(32), trees=True)


def short() -> None:
    """A convolution alone: single rows, trees and prompts; and rows of an accepted path."""
    shape = ConvolutionShape.of_columns(2048, 3)  # of LFM2-1.2B
    format = StateFormat((0, 1), shape, ring_rows(16), torch.bfloat16)
    states = StateStore(format, empty(2, format.slot_bytes, dtype=torch.uint8))
    rule = ShortConvolution(shape, empty(3, 2048, dtype=torch.float32))
    for most, tree in ((1, False), (8, True), (256, False)):
        rows = StateRows(*_words(2 * most), most, trees=tree)
        groups = StateGroups(rows, None, None, None, None)
        convolve(empty(2 * most, 2048), rule, states.layers[0], groups, pdl=True)
    batch = RoundBatch(SlotTables(TableSizes(slots=3, max_pages=4, width=16), "meta"), int32(2), 16, pdl=True)
    keep_path(batch, RoundVerdicts(int32(2, FACTS + 16), int32(2, 6)), states, SolvedStore.on(states))


def _words(m: int) -> list[torch.Tensor]:
    """What `StateRows` has of two sequences with m rows."""
    return [*(int32(2) for _ in range(6)), int32(m), int32(m)]


def _room(m: int, shape: DeltaShape = SHAPE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return empty(m, shape.value_heads * shape.value_size, dtype=dtype)


@kernel
def _reads_in_an_if(x, y, count, last):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    state = tl.load(y + row * 16 + column)
    acc = state
    for turn in range(count):
        some = tl.load(x + turn * 256 + row * 16 + column)
        acc = tl.dot(some, state, acc, input_precision="ieee")
        if turn != last:
            state = tl.dot(tl.trans(some), acc, input_precision="ieee")
    tl.store(y + row * 16 + column, acc)


@triton.jit
def _rows_times_joined(rows, x, DTYPE: tl.constexpr):
    """As `order.rows_times`, both parts of x side by side in one product."""
    high, low = parts_of(x, DTYPE)
    both = tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))
    made = tl.reshape(tl.dot(rows, both), (rows.shape[0], 2, x.shape[1]))
    high, low = tl.split(tl.permute(made, (0, 2, 1)))
    return apart(high, low)


def side_by_side() -> None:
    """Prompts, whose walk multiplies so: in this process from here on, which compiles them and ends."""
    vars(prompt_kernels)["rows_times"] = _rows_times_joined
    prompts()


def faulty() -> None:
    """A kernel of which Triton overlooks a read."""
    _reads_in_an_if[(1,)](empty(16, 256, dtype=torch.float32), empty(256, dtype=torch.float32), 5, 4)


def _given(
    m: int, most: int, dtype: torch.dtype = torch.bfloat16, shape: DeltaShape = SHAPE, *, trees: bool = False
) -> tuple[torch.Tensor, torch.Tensor, DeltaLayer, StateRows]:
    format = StateFormat((0,), shape, ring_rows(16), dtype)
    stored = StateStore(format, empty(2, format.slot_bytes, dtype=torch.uint8)).layers[0]
    filters = empty(4, shape.inputs, dtype=torch.float32)
    parts = () if shape.corrects else (filters[0], empty(shape.value_heads, dtype=torch.float32))
    rule = DeltaRule(shape, filters, *parts)
    rows = StateRows(*_words(m), most, trees=trees)
    gates = empty(m, shape.gates, dtype=torch.float32)
    return (
        empty(m, shape.inputs, dtype=dtype),
        gates,
        DeltaLayer(rule, stored, SolvedRows.on(stored, shape)),
        rows,
    )


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Path]]:
    """Compiles a recipe of this file -> the paths of its kernels' PTX."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def compile_recipe(recipe: str) -> list[Path]:
        KernelWarmup(f"tests.unit.test_states_code:{recipe}", (), 90, processes=2).wait()
        return list(tmp_path.rglob("*.ptx"))

    return compile_recipe


@pytest.mark.parametrize(
    ("recipe", "kernels"),
    [("few", 4), ("prompts", 5), ("space", 6), ("float32", 5), ("path", 2), ("short", 7), ("channels", 6)],
)
def test_kernels_compile(recipe: str, kernels: int, compiled: Callable[[str], list[Path]]) -> None:
    code = compiled(recipe)
    assert len(code) == kernels
    for path in code:
        text = path.read_text()
        assert ".local" not in text, "what no register has is slow"
        assert json.loads(path.with_suffix(".json").read_text())["shared"] <= SHARED_BYTES
        assert "red.global.add.f32" not in text
        assert not list(late_reads(path.with_suffix(".ttgir").read_text()))
        assert not list(unfenced(path.with_suffix(".ttgir").read_text()))


def test_numbers_that_pass_a_barrier_before_their_fence_are_noticed(
    compiled: Callable[[str], list[Path]],
) -> None:
    """A product that gave an H200 wrong numbers."""
    code = compiled("side_by_side")
    found = {path.stem: list(unfenced(path.with_suffix(".ttgir").read_text())) for path in code}
    assert [name for name, lines in found.items() if lines] == ["_walk"]


def test_a_read_that_triton_overlooks_is_noticed(compiled: Callable[[str], list[Path]]) -> None:
    [path] = compiled("faulty")
    assert list(late_reads(path.with_suffix(".ttgir").read_text()))
