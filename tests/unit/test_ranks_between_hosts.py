"""Groups of ranks on different hosts exchange pages, whatever their numbers: each rank gets its heads."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import message
from eyas.engine.kv.staging import PageStaging
from eyas.engine.loading import travel
from prefill_svc import transfer
from tests.rpc.real_worker import RealWorker, alone, decoding, prefill, real_worker
from tests.unit import interpreted
from tests.unit.hybrid_rig import write_hybrid
from tests.unit.hybrid_sizes import RANKS, SIZES
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


def request(name: str = "r", prompt: tuple[int, ...] = tuple(range(3, 60))) -> GenerationRequest:
    """A prompt of 4 pages."""
    return GenerationRequest(name, prompt, SamplingParams(temperature=0.8, seed=5, max_tokens=4))


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_tiny_llama(tmp_path / "model", layers=2, tied=False)
    return EngineConfig(
        model=str(tmp_path / "model"), draft=None, num_pages=32, max_running=4, chunk_tokens=32,
        context_length=128,
    )  # fmt: skip


async def pulled(
    owner: EngineConfig, puller: EngineConfig, by: str, asked: GenerationRequest
) -> tuple[list[int], str]:
    """The tokens of a prompt that `owner` computes and `puller` goes on with, and how its pages came."""
    async with real_worker(owner, Role.PREFILL) as a:
        to = {"registry": f"static:{a.address}", "transfer": by}
        async with real_worker(puller, Role.DECODE, **to) as b, decoding(b) as decode:
            decode.attach(asked, await prefill(a, asked))
            found: tuple[list[int], str] = await decode.tokens()
            await a.idle()
            await b.idle()
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["tcp", "grpc"])
@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
async def test_unequal_groups_give_what_one_worker_gives(
    config: EngineConfig, tmp_path: Path, there: int, here: int, by: str
) -> None:
    owner = of_ranks(config, there, str(tmp_path / "there"))
    puller = of_ranks(config, here, str(tmp_path / "here"))
    tokens, path = await pulled(owner, puller, by, request())
    expected = await alone(of_ranks(config, 1, ""), tmp_path / "alone", request())
    assert (tokens, path) == (expected[0], by)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
async def test_recurrent_states_go_between_unequal_groups(tmp_path: Path, there: int, here: int) -> None:
    """A prompt longer than a span, so that there are states and rows behind them."""
    write_hybrid(tmp_path / "model", "qwen3_5", **SIZES | RANKS)
    config = EngineConfig(
        model=str(tmp_path / "model"), draft=None, num_pages=32, max_running=4, chunk_tokens=32,
        context_length=128, state_slots=8,
    )  # fmt: skip
    asked = request(prompt=tuple(3 + 7 * i % 28 for i in range(75)))
    owner = of_ranks(config, there, str(tmp_path / "there"))
    puller = of_ranks(config, here, str(tmp_path / "here"))
    tokens, path = await pulled(owner, puller, "tcp", asked)
    expected = await alone(of_ranks(config, 1, ""), tmp_path / "alone", asked)
    assert (tokens, path) == (expected[0], "tcp")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Copies out of pools wait while `shut`; `begun` counts how often one has looked."""
    copy, state = PageStaging._copy_out, SimpleNamespace(shut=False, begun=0)

    def guarded(*args: Any) -> int:
        while state.shut:
            state.begun += 1
            time.sleep(0.01)
        return copy(*args)

    monkeypatch.setattr(PageStaging, "_copy_out", guarded)
    return state


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_rank_that_dies_while_its_pages_are_pulled_costs_no_answer(
    config: EngineConfig, tmp_path: Path, gate: SimpleNamespace
) -> None:
    """Its worker ends with the next step. The prompt is computed here then, and every slot comes back."""
    there = dataclasses.replace(of_ranks(config, 2, str(tmp_path / "there")), roles=(Role.PREFILL,))
    owner = await RealWorker(there, "static:").start()
    puller = of_ranks(config, 1, str(tmp_path / "here"))
    to = {"registry": f"static:{owner.address}", "transfer": "tcp"}
    async with real_worker(puller, Role.DECODE, **to) as b, decoding(b) as decode:
        decode.attach(request("warm"), await prefill(owner, request("warm")))
        expected = (await decode.tokens())[0]
        gate.shut = True
        decode.attach(request(), await prefill(owner, request()))
        async with asyncio.timeout(30):
            while not gate.begun:
                await asyncio.sleep(0.01)
        (rank,) = multiprocessing.active_children()
        os.kill(rank.pid or 0, signal.SIGKILL)
        with pytest.raises(EyasError):
            await prefill(owner, request("next", tuple(range(60, 3, -1))))
        await decode.next(message.PagesLost)
        gate.shut = False
        decode.session.attach("r", 3, (), ())
        assert await decode.tokens() == (expected, "")
        await b.idle()
        slots = b.engine._parts.copiers[0]._landing.slots
        assert slots.free == slots.total
    owner._running.cancel()  # its front, whose process would have ended with the engine
    with contextlib.suppress(asyncio.CancelledError, EyasError):
        await owner._running
