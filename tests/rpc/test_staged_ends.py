"""Pages on their way through staging when something ends: every slot goes back, and no answer is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_worker import RealWorker, decoding, prefill, real_worker, tiny_config
from staged_rig import PROMPT, SLOTS, WINDOW, pair, pretend, request, slots_free, slots_left, until

from eyas.common.config import EngineConfig
from eyas.common.errors import InvalidRequest, TransferFailed
from eyas.common.types import KvHandle, PageShare, Role
from eyas.common.wire import message, rpc
from eyas.common.wire.transfer import TransferClient, WatchReady
from eyas.engine.kv.staging import PageStaging
from prefill_svc import transfer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def config(models: Path) -> EngineConfig:
    return tiny_config(models)


@pytest.fixture(autouse=True)
def device_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Copies to staging wait while `shut`; `begun` counts them."""
    copy, state = PageStaging._copy_out, SimpleNamespace(shut=False, begun=0)

    def guarded(*args: Any) -> int:
        state.begun += 1
        while state.shut:
            time.sleep(0.002)
        return copy(*args)

    monkeypatch.setattr(PageStaging, "_copy_out", guarded)
    return state


@contextlib.asynccontextmanager
async def watching(a: RealWorker) -> AsyncIterator[tuple[TransferClient, KvHandle]]:
    """The owner of a prompt as one puller meets it, and its handle, whose Watch is open."""
    (handle,) = await prefill(a, request())
    async with rpc.channel(a.address) as channel:
        owner = TransferClient(channel, a.address)
        updates = owner.watch(handle, 1)
        assert await anext(updates) == WatchReady(len(PROMPT))
        yield owner, handle
        await updates.aclose()


async def test_a_fetch_of_all_pages_brings_their_bytes_and_no_others(
    config: EngineConfig, tmp_path: Path
) -> None:
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
        async with watching(a) as (owner, handle):
            (secret,) = await prefill(a, request(1))
            pages = handle.shards[0].pages
            found = b"".join([chunk async for chunk in owner.fetch(handle, 1, pages)])
            assert found == a.engine._parts.pools[0].tensor[list(pages)].numpy().tobytes()
            foreign = next(page for page in secret.shards[0].pages if page not in pages)
            with pytest.raises(InvalidRequest, match="does not name"):
                await anext(owner.fetch(handle, 1, (foreign,)))
            proof = b"".join([chunk async for chunk in owner.fetch_proof(handle.group, handle.epoch, [128])])
            assert proof == a.engine._parts.pools[0].pages[128].numpy().tobytes()
        await until(lambda: slots_left(a) == SLOTS)


async def test_some_heads_of_pages_are_fetched_and_none_that_are_not_there(
    config: EngineConfig, tmp_path: Path
) -> None:
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a, watching(a) as (owner, handle):
        pages, pool = handle.shards[0].pages, a.engine._parts.pools[0].tensor
        heads = pool.shape[-2]
        found = b"".join([chunk async for chunk in owner.fetch(handle, 1, pages, PageShare(0, heads - 1, 1))])
        assert found == pool[list(pages)][..., heads - 1 :, :].contiguous().numpy().tobytes()
        on_device = PageShare(on_device=True)
        for share, says in (
            (PageShare(1), "rank is one of 1 ranks"),
            (PageShare(0, heads, 1), f"heads are some of {heads}"),
            (PageShare(0, 1, heads), f"heads are some of {heads}"),
            (on_device, "slots that the caller reads"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                await anext(owner.fetch(handle, 1, pages, share))
        with pytest.raises(TransferFailed, match="no staging in the memory of its devices"):
            async with owner.stage(handle, 1, pages[:WINDOW], on_device):
                pass
        await until(lambda: slots_left(a) == SLOTS)


async def test_a_fetch_that_ends_early_gives_its_slots_back(
    config: EngineConfig, tmp_path: Path, gate: SimpleNamespace
) -> None:
    """In the middle of its bytes, and before its first window is copied."""
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
        async with watching(a) as (owner, handle):
            reading = owner.fetch(handle, 1, handle.shards[0].pages)
            await anext(reading)
            await reading.aclose()
            await until(lambda: slots_left(a) == SLOTS)
            gate.shut = True
            begun, left = gate.begun, SLOTS - transfer.AHEAD * WINDOW
            waiting = asyncio.ensure_future(anext(owner.fetch(handle, 1, handle.shards[0].pages)))
            await until(lambda: gate.begun > begun)
            assert slots_left(a) == left, "three windows have theirs"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.sleep(0.2)
            assert slots_left(a) == left, "they are still written to"
            gate.shut = False
            await until(lambda: slots_left(a) == SLOTS)
            assert not a.engine._parts.stager._calls and not a.engine._parts.stager._waiting


async def test_pages_that_were_released_while_they_were_copied_are_not_sent(
    config: EngineConfig, tmp_path: Path, gate: SimpleNamespace
) -> None:
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
        async with watching(a) as (owner, handle):
            gate.shut, begun = True, gate.begun
            waiting = asyncio.ensure_future(anext(owner.fetch(handle, 1, handle.shards[0].pages)))
            await until(lambda: gate.begun > begun)
            assert await owner.release(handle, 1)
            gate.shut = False
            with pytest.raises(TransferFailed, match="no Watch of handle"):
                await waiting
            await until(lambda: slots_left(a) == SLOTS)


async def test_a_cancelled_request_frees_the_slots_of_both_ends(
    config: EngineConfig, tmp_path: Path, gate: SimpleNamespace
) -> None:
    async with pair(config, tmp_path, "grpc") as (a, b), decoding(b) as decode:
        handles = await prefill(a, request())
        gate.shut = True
        decode.attach(request(), handles)
        await until(lambda: gate.begun > 0)
        decode.session.cancel("r0")
        gate.shut = False
        await b.idle()
        await a.idle()
        await until(lambda: (slots_left(a), slots_free(b)) == (SLOTS, SLOTS))
        tokens = await answer(decode, request(1), await prefill(a, request(1)))
        assert len(tokens) == 12


async def answer(decode: Any, made: Any, handles: Any) -> list[int]:
    """The tokens of `made`, whatever else is told."""
    decode.attach(made, handles)
    tokens: list[int] = []
    while True:
        for entry in (await decode.next(message.StepReply)).entries:
            if entry.id == made.id:
                tokens[entry.index :] = entry.tokens
                if entry.finish is not None:
                    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(("owners", "path"), [("there", "tcp"), ("here", "shm")])
async def test_an_owner_that_is_killed_in_the_middle_is_lost(
    config: EngineConfig, models: Path, tmp_path: Path, owners: str, path: str
) -> None:
    """Its second window is being copied; what came of the first one is worth nothing."""
    for side in {"here", owners}:
        (tmp_path / side).mkdir()
    command = [sys.executable, str(HERE / "staged_rig.py"), str(models), str(tmp_path / owners)]
    paths = os.pathsep.join([str(HERE.parent.parent), *sys.path[1:]])
    env = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout
        address = (await asyncio.to_thread(process.stdout.readline)).strip()
        owner: Any = SimpleNamespace(address=address, dial=rpc.channel)
        puller = {"registry": f"static:{address}", "pool_dir": str(tmp_path / "here")}
        async with real_worker(config, Role.DECODE, **puller) as b, decoding(b) as decode:
            decode.attach(request(), await prefill(owner, request()))
            copier = b.engine._parts.copiers[0]
            await until(lambda: any(going.bytes for going in copier._jobs if not going.job.proof))
            assert {going.route.backend.name for going in copier._jobs if going.bytes} == {path}
            assert slots_free(b) < SLOTS, "other windows still come"
            process.send_signal(signal.SIGKILL)
            lost = await decode.next(message.PagesLost)
            assert (lost.id, lost.attempt) == ("r0", 2)
            decode.session.attach("r0", 3, (), ())
            tokens, by = await decode.tokens()
            assert len(tokens) == 12 and by == ""
            await b.idle()
            assert slots_free(b) == SLOTS and not copier._jobs
    finally:
        process.kill()
        process.communicate()
