"""Groups of ranks on different hosts exchange pages, whatever their numbers: each rank gets its heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.loading import travel
from prefill_svc import transfer
from tests.rpc.real_worker import alone, decoding, prefill, real_worker
from tests.unit import interpreted
from tests.unit.ranks_rig import install, no_group_stays, of_ranks
from tests.unit.tiny import write_tiny_llama

WINDOW = 2  # pages

interpreted.install()
no_group = pytest.fixture(autouse=True)(no_group_stays)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(travel, "STAGED_BYTES", 0)
    for module in (travel, transfer):
        monkeypatch.setattr(module, "window_pages", lambda page_bytes: WINDOW)


def request(name: str = "r") -> GenerationRequest:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=4)
    return GenerationRequest(name, tuple(range(3, 60)), params)  # 4 pages


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_tiny_llama(tmp_path / "model", layers=2, tied=False)
    return EngineConfig(
        model=str(tmp_path / "model"), draft=None, num_pages=32, max_running=4, chunk_tokens=32,
        context_length=128,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["tcp", "grpc"])
@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
async def test_unequal_groups_give_what_one_worker_gives(
    config: EngineConfig, tmp_path: Path, there: int, here: int, by: str
) -> None:
    owner = of_ranks(config, there, str(tmp_path / "there"))
    puller = of_ranks(config, here, str(tmp_path / "here"))
    async with real_worker(owner, Role.PREFILL) as a:
        to = {"registry": f"static:{a.address}", "transfer": by}
        async with real_worker(puller, Role.DECODE, **to) as b, decoding(b) as decode:
            decode.attach(request(), await prefill(a, request()))
            tokens, path = await decode.tokens()
            await a.idle()
            await b.idle()
    expected = await alone(of_ranks(config, 1, ""), tmp_path / "alone", request())
    assert (tokens, path) == (expected[0], by)
