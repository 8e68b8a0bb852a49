"""Whole engines that draft with the MTP layer in their model's own folder: no token is another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from loopback import Loopback, split_configs
from loopback_runs import assert_idle, mixed_requests, run_all, undrafted

from eyas.common.config import EngineConfig, SpeculationConfig
from tests.unit.device_engines import DRAFTS, SIZES, answers, on_device, requests, rounds, tokens
from tests.unit.mtp_engines import CHAIN, TREE, config_of
from tests.unit.tiny_mtp import write_tiny_mimo, write_tiny_nextn

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED = mixed_requests(6)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(write_tiny_mimo, id="mimo", marks=pytest.mark.slow),
        pytest.param(partial(write_tiny_nextn, stages=3), id="three"),
        pytest.param(write_tiny_nextn, id="nextn", marks=pytest.mark.slow),
    ],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    return config_of(request.param(folder / "model"), folder)


@pytest.fixture(scope="module")
def expected(base: EngineConfig) -> list[dict[int, list[int]]]:
    """What plain decoding says to `ASKED`."""
    return undrafted(base, ASKED)


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        pytest.param(TREE, False, id="unified tree"),
        pytest.param(CHAIN, True, id="split chain"),
        pytest.param(CHAIN, False, id="unified chain", marks=pytest.mark.slow),
        pytest.param(TREE, True, id="split tree", marks=pytest.mark.slow),
    ],
)
def test_an_mtp_head_changes_no_token(
    base: EngineConfig, expected: list[dict[int, list[int]]], spec: SpeculationConfig, split: bool
) -> None:
    config = replace(base, speculation=spec)
    cluster = Loopback(*(split_configs(config) if split else (config,)))
    assert run_all(cluster, ASKED, split=split) == expected
    entries = [entry for result in cluster.results.values() for entry in result.entries]
    assert any(entry.accepted for entry in entries), "nothing was ever accepted: drafting was not exercised"
    assert_idle(cluster)
    cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("drafts", [DRAFTS["chain"], DRAFTS["tree"]], ids=["chain", "tree"])
def test_a_device_drafts_as_the_plain_engine_does(
    tmp_path: Path, drafts: SpeculationConfig, stages: int
) -> None:
    """Tokens, and where the rounds end. Of few random models this one's head is right the most often."""
    model = write_tiny_mimo(tmp_path / "model", seed=5, stages=stages, **(SIZES | {"layers": 1}))
    small = {"num_pages": 32, "chunk_tokens": 16, "max_running": 4, "context_length": 128}
    plain = replace(config_of(model, tmp_path), speculation=drafts, **small)
    expected, _ = answers(plain, requests()[:2])
    found, _ = answers(on_device(plain), requests()[:2])
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    assert all(any(entry.accepted for entry in result.entries) for result in found)
