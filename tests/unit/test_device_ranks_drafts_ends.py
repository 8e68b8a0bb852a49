"""Attention ranks with other heads, drafts that are trees or looked up, few pages, or a rank that errs.

One group at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eyas.common.config import SpeculationConfig
from eyas.common.errors import EngineError
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.step import StepInput
from eyas.engine.loading import build, follower
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.base import Drafted
from eyas.engine.parallel.ranks import RankChannel, RankInfo
from eyas.engine.speculation.device import DeviceProposer
from tests.unit.device_engines import write_head
from tests.unit.device_ranks_rig import PLAIN, device_ranks, interpreted_follower, no_group_stays, tokens
from tests.unit.families import write_family
from tests.unit.grammar_requests import requests as held
from tests.unit.grammar_requests import write_tokenizer
from tests.unit.loopback_runs import assert_idle
from tests.unit.ranks_drafts_rig import CHAIN, TREE, accepted, asked, everything, knowing, one_rank, walks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

no_group_is_left = pytest.fixture(autouse=True)(no_group_stays)

PATIENCE_S = 60.0  # of ranks that wait for each other where one errs


def test_trees(tmp_path: Path) -> None:
    """A level of every sequence's tree is a pass of all ranks."""
    config = knowing(tmp_path, TREE)
    engine, wanted = device_ranks(config), one_rank(config, everything())
    ours = engine.run(everything())
    assert tokens(ours) == tokens(wanted) and walks(ours) == walks(wanted)
    assert accepted(ours) >= 10
    engine.cluster.close()


def test_drafts_that_are_looked_up(tmp_path: Path) -> None:
    """In prompts, outputs and predictions; no head, so nothing is exchanged, and forks join all the same."""
    ngram = SpeculationConfig(steps=2, draft_tokens=3, ngram=True)
    config = replace(knowing(tmp_path, ngram), draft=None)
    bare = [asked("first", 34, 8), asked("second", 4, 8)]
    pairs = zip(bare, one_rank(config, bare), strict=True)
    told = [structs.replace(request, predicted=tuple(answer.tokens[0])) for request, answer in pairs]
    requests = [*told, asked("forks", 34, 4, 3, temperature=1.0, seed=3)]
    engine, wanted = device_ranks(config), one_rank(config, requests)
    ours = engine.run(requests)
    assert walks(ours) == walks(wanted) and accepted(ours) >= 6
    engine.cluster.close()


def test_a_dense_head_and_grammars(tmp_path: Path) -> None:
    """Its passes are each rank's own. Masks of both ranks' outputs are made by rank 0, for all nodes."""
    write_family(tmp_path / "m", "mixtral", vocab_size=64, num_hidden_layers=2)
    write_tokenizer(tmp_path / "m")
    head = write_head(tmp_path / "head", tmp_path / "m")
    config = replace(PLAIN, model=str(tmp_path / "m"), draft=str(head), pool_dir=str(tmp_path))
    config = replace(config, speculation=CHAIN)
    engine, wanted = device_ranks(config), one_rank(config, held())
    ours = engine.run(held())
    assert tokens(ours) == tokens(wanted)
    assert accepted(ours) > 0, "no draft beside a mask was right"
    engine.cluster.close()


def test_preempted_sequences_come_back_with_their_drafts(tmp_path: Path) -> None:
    config = replace(knowing(tmp_path), num_pages=7)
    long = [asked(f"r{i}", 20, 18) for i in range(6)]
    engine, wanted = device_ranks(config), one_rank(config, long)
    assert tokens(engine.run(long)) == tokens(wanted)
    assert engine.cluster.workers["w"].load.preemptions > 0
    assert_idle(engine.cluster)
    engine.cluster.close()


# --- a rank that errs -------------------------------------------------------------------------------------


def _erring(change: Callable[[], None]) -> Callable[[EngineSpec, RankInfo, RankChannel], None]:
    """A follower that does all as it should until the first step that it is told of."""

    def main(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
        follower.LOAD_S = PATIENCE_S
        begin, erring = StepExecutor.begin, [False]

        def begun(self: StepExecutor, step: StepInput) -> None:
            if not erring[0]:
                erring[0] = True
                change()
            begin(self, step)

        StepExecutor.begin = begun  # type: ignore[method-assign]
        interpreted_follower(loaded, rank_info, channel)

    return main


def _leaves_out_a_pass() -> None:
    def run(self: DeviceProposer, features: Any, *_: Any) -> Drafted:
        return Drafted(features, features)

    DeviceProposer.run = run  # type: ignore[method-assign,assignment]


def _has_another_width() -> None:
    begin = StepExecutor.begin

    def narrower(self: StepExecutor, step: StepInput) -> None:
        shape = replace(step.shape, width=step.shape.width - 1)
        begin(self, replace(step, shape=shape, data=step.data[: shape.sections["all"][1]]))

    StepExecutor.begin = narrower  # type: ignore[method-assign]


def skips(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    _erring(_leaves_out_a_pass)(loaded, rank_info, channel)


def narrows(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    _erring(_has_another_width)(loaded, rank_info, channel)


@pytest.mark.parametrize("main", [skips, narrows])
def test_a_rank_out_of_step_ends_the_engine_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., None]
) -> None:
    """Ranks that do not take the same passes, of as many rows, wait for each other: not for ever."""
    monkeypatch.setattr(build, "LOAD_S", PATIENCE_S)
    engine = device_ranks(knowing(tmp_path), main)
    worker = engine.cluster.workers["w"]
    ended: list[BaseException] = []
    monkeypatch.setattr("threading.excepthook", lambda hooked: ended.append(hooked.exc_value))
    engine.cluster.submit(asked("long", 20, 40), split=False)
    worker.thread.join(2 * PATIENCE_S)
    assert not worker.thread.is_alive(), "the engine hangs, or has not noticed"
    assert isinstance(ended[0], EngineError)
    assert "the ranks could not do a step together" in str(ended[0]) or "rank 1 of 2 has ended" in str(
        ended[0]
    )
