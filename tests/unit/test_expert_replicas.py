"""Replicas of experts on attention ranks in real processes: same answers, to the bit, and ranks that do as
much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.errors import ConfigError
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loop import expert_balance
from eyas.engine.models.ops.parts import ExpertsPart
from eyas.engine.parallel.expert_places import ExpertPlaces, SpreadExperts
from eyas.engine.parallel.expert_plan import NONE, ExpertSlots, rank_loads, unevenness
from tests.unit.attention_ranks_rig import BASE, SIZES, Ranked, alone, answers, mixed, ranked
from tests.unit.tiny_deepseek import write_tiny_deepseek

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = SIZES["n_routed_experts"]
FAVOURITES = EXPERTS // 4
"""Experts of the first rank that nearly every row chooses among."""


def write_skewed(folder: Path) -> None:
    """A model whose router prefers its first experts by far."""
    write_tiny_deepseek(folder, SIZES | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2})
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[:FAVOURITES] += 0.6
    save_file(tensors, path)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    write_skewed(folder)
    made: EngineConfig = replace(BASE, model=str(folder), pool_dir=str(tmp_path_factory.mktemp("pools")))
    return made


@pytest.fixture(scope="module")
def two(config: EngineConfig) -> Iterator[Ranked]:
    """Two ranks that look at their loads all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_balance.ExpertBalance.__init__, "__defaults__", (0.02,))
        engine = ranked(patch, replace(config, expert_replicas=3), 2)
    yield engine
    engine.cluster.close()


def balance_of(engine: Ranked) -> expert_balance.ExpertBalance:
    (worker,) = engine.cluster.workers.values()
    found = worker.engine._parts.balance
    assert isinstance(found, expert_balance.ExpertBalance)
    return found


def test_answers_are_those_of_one_rank_before_and_after_replicas_are_made(
    two: Ranked, config: EngineConfig
) -> None:
    wanted = answers(alone(config, mixed(9, seed=1)))
    ranks = balance_of(two)._ranks
    rounds = 0
    while all(expert == NONE for each in ranks.replicas for expert in each):
        assert answers(two.run(mixed(9, seed=1))) == wanted
        assert (rounds := rounds + 1) < 20, "no replica was made"
    assert answers(two.run(mixed(9, seed=1))) == wanted
    loads = balance_of(two)._recent
    for own, replicas in zip(loads, ranks.replicas, strict=True):
        if not own.any():
            continue
        before, after = (unevenness(own, ranks.slots, each) for each in (ranks.slots.empty, replicas))
        assert before > 1.5 and after < 1.15, (before, after, rank_loads(own, ranks.slots, replicas))
    copies = [expert for each in ranks.replicas for expert in each if expert != NONE]
    assert copies and max(copies) < EXPERTS // 2, "only the first rank's experts are busy"


def test_a_drifted_load_moves_replicas(two: Ranked, config: EngineConfig) -> None:
    """The steps go on meanwhile, and give the same."""
    balance, requests = balance_of(two), mixed(6, seed=2)
    ranks, wanted = balance._ranks, answers(alone(config, requests))
    two.run(requests)
    before = ranks.replicas
    balance._recent[:, EXPERTS // 2 :] += 1e6 * np.arange(1, EXPERTS // 2 + 1) ** 2  # the other rank's
    for _ in range(20):
        assert answers(two.run(requests)) == wanted
        if ranks.replicas != before:
            break
    assert ranks.replicas != before
    assert answers(two.run(requests)) == wanted


def test_replicas_that_are_no_copies_are_noticed(
    two: Ranked, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sends others' numbers in the place of its experts': then answers are others. What shows that the
    tests above can fail; the last of those that share the ranks.
    """
    balance, requests = balance_of(two), mixed(6, seed=2)
    ranks, wanted = balance._ranks, answers(alone(config, requests))
    honest = ExpertsPart.expert
    monkeypatch.setattr(ExpertsPart, "expert", lambda *one: [each + 1 for each in honest(*one)])
    before = ranks.replicas
    balance._recent[:] = 0
    balance._recent[:, : EXPERTS // 2] += 1e8 * np.arange(1, EXPERTS // 2 + 1) ** 2
    for _ in range(20):
        found = answers(two.run(requests))
        if ranks.replicas != before and found != wanted:
            return
    raise AssertionError("replicas of other numbers gave the same answers")


def places_of(slots: ExpertSlots, rank: int = 0) -> ExpertPlaces:
    return SpreadExperts(slots, rank, 1, "cpu").of("a layer")


def test_rows_are_dealt_out_evenly_and_alike_on_all_ranks() -> None:
    slots = ExpertSlots(8, 2, 2)
    each = [places_of(slots, rank) for rank in range(2)]
    for places in each:
        places.set((4, NONE, 0, 1))
    chosen = torch.zeros(400, 2, dtype=torch.int64)
    chosen[:, 1] = 4
    turns = torch.arange(400)
    found = [places.placed(chosen, turns) for places in each]
    assert torch.equal(*found)
    assert found[0][:, 0].bincount(minlength=12)[[0, 10]].tolist() == [200, 200]
    assert found[0][:, 1].bincount(minlength=12)[[6, 4]].tolist() == [200, 200]
    assert torch.equal(each[0].owners[found[0]], chosen)
    each[1].count(chosen)
    assert each[1].loads.tolist() == [400, 0, 0, 0, 400, 0, 0, 0]


def test_without_replicas_a_slot_is_a_home() -> None:
    places = places_of(ExpertSlots(8, 2, 0))
    chosen = torch.arange(8)[None]
    assert torch.equal(places.placed(chosen, torch.tensor([3])), chosen)


def test_what_cannot_be_is_refused_by_name(config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--expert-replicas: only ranks that share experts") as error:
        resolve_engine("cpu", draft=None, expert_replicas=1)
    assert error.value.param == "expert-replicas"
    with pytest.raises(ConfigError, match=f"--expert-replicas: {EXPERTS} are more than the {EXPERTS // 2}"):
        EngineSpec.of(replace(config, dp_attention=2, expert_replicas=EXPERTS))
