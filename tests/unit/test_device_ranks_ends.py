"""Attention ranks on the device path that have other models, few pages, or die. One group at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.common.config import EngineConfig
from eyas.common.errors import EngineError
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.parallel.ranks import RankChannel, RankInfo
from tests.unit.attention_ranks_rig import alone, request
from tests.unit.device_ranks_rig import (
    BACKENDS,
    PLAIN,
    SIZES,
    device_ranks,
    interpreted_follower,
    mixed,
    no_group_stays,
    tokens,
)
from tests.unit.families import write_family
from tests.unit.fp8_formats import FORMATS, write_format
from tests.unit.grammar_requests import requests, write_tokenizer
from tests.unit.loopback_runs import assert_idle
from tests.unit.tiny_deepseek import write_tiny_deepseek

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

no_group_is_left = pytest.fixture(autouse=True)(no_group_stays)


def _config(folder: Path) -> EngineConfig:
    return replace(PLAIN, model=str(folder / "m"), pool_dir=str(folder))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "two shared experts"])
def test_other_families(tmp_path: Path, family: str) -> None:
    """Rows of the narrow way; a shared expert of another width, which stands beside the grouped products."""
    if family == "two shared experts":
        write_tiny_deepseek(tmp_path / "m", SIZES | {"n_shared_experts": 2})
    else:
        write_family(tmp_path / "m", family, vocab_size=64, num_hidden_layers=2)
    wanted = tokens(alone(_config(tmp_path), mixed()))
    engine = device_ranks(_config(tmp_path))
    assert tokens(engine.run(mixed())) == wanted
    assert sum(engine.idle()) > 0
    engine.cluster.close()


def test_experts_in_fp8_round_rows_as_on_one_rank(tmp_path: Path) -> None:
    """Rows have one scale for all experts, so each rank must know those of experts that it has not."""
    write_family(tmp_path / "plain", "mixtral", vocab_size=64, num_hidden_layers=2)
    write_format(tmp_path / "m", tmp_path / "plain", FORMATS["fp8, static"])
    config = _config(tmp_path)
    wanted = tokens(alone(replace(config, **BACKENDS), mixed()[:4]))
    engine = device_ranks(config)
    assert tokens(engine.run(mixed()[:4])) == wanted
    engine.cluster.close()


def test_grammars_hold_outputs_of_both_ranks(tmp_path: Path) -> None:
    """Rows with masks on one rank beside special ones without, or none at all, on the other."""
    write_family(tmp_path / "m", "mixtral", vocab_size=64, num_hidden_layers=2)
    write_tokenizer(tmp_path / "m")
    wanted = tokens(alone(_config(tmp_path), requests()))
    engine = device_ranks(_config(tmp_path))
    assert tokens(engine.run(requests())) == wanted
    engine.cluster.close()


def _always(self: ExpandedPrompts, spans: Sequence[QuerySpan]) -> bool:
    return True


def _expanding(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    ExpandedPrompts.pays = _always  # type: ignore[method-assign]
    interpreted_follower(loaded, rank_info, channel)


def test_prompts_in_the_expanded_form_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank plans its own chunks alone: the step has as many rows as the longer ones of the other."""
    write_tiny_deepseek(tmp_path / "m", SIZES)
    wanted = tokens(alone(_config(tmp_path), mixed()))
    monkeypatch.setattr(ExpandedPrompts, "pays", _always)
    engine = device_ranks(_config(tmp_path), _expanding)
    assert tokens(engine.run(mixed())) == wanted
    assert any(rows[0] != rows[1] for _, rows in engine.seen)
    engine.cluster.close()


def test_preempted_sequences_come_back_to_their_rank(tmp_path: Path) -> None:
    write_tiny_deepseek(tmp_path / "m", SIZES)
    config = replace(_config(tmp_path), num_pages=6)
    long = [request(f"r{i}", 20, 30, seed=i) for i in range(6)]
    wanted = tokens(alone(replace(config, num_pages=32), long))
    engine = device_ranks(config)
    assert tokens(engine.run(long)) == wanted
    assert engine.cluster.workers["w"].load.preemptions > 0
    assert_idle(engine.cluster)
    engine.cluster.close()


def test_a_rank_that_dies_ends_the_engine_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_deepseek(tmp_path / "m", SIZES)
    engine = device_ranks(_config(tmp_path))
    worker = engine.cluster.workers["w"]
    ended: list[BaseException] = []
    monkeypatch.setattr("threading.excepthook", lambda hooked: ended.append(hooked.exc_value))
    result = engine.cluster.submit(request("long", 20, 100), split=False)
    while not result.entries:
        time.sleep(0.002)
    (follower,) = engine.runner._executor._leader._followers._followers
    os.kill(follower._process.pid, signal.SIGKILL)
    worker.thread.join(20)
    assert not worker.thread.is_alive(), "the engine hangs"
    assert isinstance(ended[0], EngineError)
    assert str(ended[0]) == "rank 1 of 2 has ended: killed by SIGKILL"
    assert not list(tmp_path.glob("*meeting"))
