"""What a device is built for, before any weight is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.common.config import GPU_DEFAULTS, EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.prompt_room import StepBudget
from eyas.engine.device.executor import WORDS
from eyas.engine.device.step import StepLayout, StepShape, tiles_for
from eyas.engine.loading.build import _prompt_rows, _ready
from eyas.engine.loading.device_build import rounds_ahead, table_sizes
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.step_shapes import buckets_of, check_words, largest, rehearsed
from eyas.engine.loading.travel import PageTransfer
from kv_transfer.copy_threads import CopyBell

TREE = SpeculationConfig(steps=5, topk=8, draft_tokens=32)
BUSHY = SpeculationConfig(steps=2, topk=64, draft_tokens=64)


def loaded(**changes: object) -> EngineSpec:
    return EngineSpec.of(replace(GPU_DEFAULTS, **changes))


def words(shape: StepShape) -> int:
    return shape.sections["all"][1]


def test_the_usual_steps_can_be_told() -> None:
    for made in (loaded(), loaded(draft=None), loaded(speculation=TREE)):
        check_words(made, buckets_of(made))


@pytest.mark.parametrize(
    "changes",
    [{"max_running": 2048}, {"cuda_graph_max_bs": 2048, "cuda_graph_bs": (2048,)}, {"chunk_tokens": 1 << 17}],
    ids=lambda changes: next(iter(changes)),
)
def test_steps_that_cannot_be_told_are_refused(changes: dict[str, object]) -> None:
    made = loaded(speculation=TREE, **changes)
    with pytest.raises(ConfigError, match="lower --max-running or --chunk-tokens"):
        check_words(made, buckets_of(made))


def test_what_all_ranks_tell_of_a_step_has_room() -> None:
    """Each rank's input is its own, but the results of all come to rank 0 as one array."""
    made = loaded(draft=None, max_running=6000)
    check_words(made, buckets_of(made))
    ranks = replace(made, config=replace(made.config, dp_attention=8))
    with pytest.raises(ConfigError, match="lower --max-running"):
        check_words(ranks, buckets_of(ranks))


@pytest.mark.parametrize("max_running", [1, 5, 64])
def test_no_step_is_larger_than_the_largest(max_running: int) -> None:
    made = loaded(max_running=max_running, chunk_tokens=300, mixed_tokens=300, cuda_graph_max_bs=max_running)
    buckets = buckets_of(made)
    most = largest(made, buckets)
    layout = StepLayout(16, 0, buckets.tile_rows)
    uneven = [1] * (max_running - 1) + [301 - max_running]  # prompts of one row, and a long one
    exact = StepShape(max_running, made.width, 300, tiles_for(uneven, layout), max_running)
    for shape in (exact, *rehearsed(made, buckets), *buckets.captured()):
        assert words(shape) <= words(most) <= WORDS
        assert shape.tiles <= most.tiles


@pytest.mark.parametrize("graphs", [0, 4, 64])
def test_the_widest_round_runs_before_the_first_request(graphs: int) -> None:
    """Captured or not: what it needs is loaded, and fits."""
    made = loaded(max_running=64, cuda_graph_max_bs=graphs)
    buckets = buckets_of(made)
    assert StepShape(64, made.width) in {*rehearsed(made, buckets), *buckets.captured()}


@pytest.mark.parametrize("config", [GPU_DEFAULTS, EngineConfig()], ids=["gpu", "cpu"])
@pytest.mark.parametrize("spec", [SpeculationConfig(), TREE, BUSHY], ids=["chain", "tree", "bushy"])
def test_page_tables_hold_what_is_reserved(config: EngineConfig, spec: SpeculationConfig) -> None:
    """A longer list of pages would be told into the next slot's table."""
    made = EngineSpec.of(replace(config, speculation=spec))
    reserved = made.target.context_length + rounds_ahead(made) * made.round_rows
    assert table_sizes(made).max_pages * config.page_size >= reserved


def test_chance_decides_where_drafts_are_verified_by_the_fast_path() -> None:
    """And the engine says so when it is ready."""
    spec = SpeculationConfig(synthetic_rates=(0.5,) * 5)
    made = loaded(speculation=spec)
    assert made.synthetic_rates == spec.synthetic_rates
    nowhere = PageTransfer(None, CopyBell(), {}, {}, {}, {}, {}, {})
    assert _ready(made.with_pages(8), nowhere, 64, 0.0).synthetic
    assert not _ready(loaded().with_pages(8), nowhere, 64, 0.0).synthetic
    assert loaded(speculation=spec, draft=None).synthetic_rates == ()
    assert loaded(speculation=spec, attention_backend="torch").synthetic_rates == ()
    assert loaded().synthetic_rates == ()


@pytest.mark.parametrize(("most", "chunk"), [(8192, 8192), (8192, 5376), (3072, 2048), (4096, 2688)])
def test_smaller_steps_of_prompts_take_from_mixed_steps_what_these_would_have_more(
    most: int, chunk: int
) -> None:
    """As many rows as a worker says of itself: steps that also decode have a bound of their own."""
    buckets, budget = buckets_of(loaded(chunk_tokens=most)), StepBudget(chunk, GPU_DEFAULTS.mixed_tokens)
    rows = _prompt_rows(buckets.mixed_prefill_budget, replace(GPU_DEFAULTS, chunk_tokens=chunk), most)
    for batch in (1, 8, 32):
        assert rows(batch, True) == budget.mixed_prefill_budget(batch * buckets.width, True)
        assert rows(batch, False) == buckets.mixed_prefill_budget(batch, False)
