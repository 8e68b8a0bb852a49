"""Workers whose pools pretend to be a device's, with hardly any staging; also one as a process to be killed.

`python staged_rig.py CONFIG_DIR POOL_DIR` is a prefill worker on the models of `tiny_config`; it says its
address, and copies its second window to staging only when it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from real_worker import RealWorker, real_worker

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.staging import PageStaging
from eyas.engine.loading import travel
from eyas.engine.loading.spec import EngineSpec
from kv_transfer.windows import AT_ONCE
from prefill_svc import transfer

PROMPT = tuple(range(3, 243))  # 15 pages
WINDOW = 2  # pages
SLOTS = AT_ONCE * WINDOW  # the prompt is longer than all of them


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Every pool is in no file, and no prompt fits into its staging."""
    patch.setattr(EngineSpec, "pool", lambda spec, group: KvPool(spec.shape(group)))
    patch.setattr(travel, "STAGED_BYTES", 0)
    for module in (travel, transfer):
        patch.setattr(module, "window_pages", lambda page_bytes: WINDOW)


def request(i: int = 0, id: str = "") -> GenerationRequest:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12)
    return GenerationRequest(id or f"r{i}", (*PROMPT[i:], *PROMPT[:i]), params)


@contextlib.asynccontextmanager
async def pair(
    config: EngineConfig, folder: Path, by: str, *roles: Role
) -> AsyncIterator[tuple[RealWorker, RealWorker]]:
    """A prefill worker, and a worker of these `roles` (Role.DECODE alone) that pulls from it."""
    async with real_worker(config, Role.PREFILL, pool_dir=str(folder)) as a:
        puller = {"registry": f"static:{a.address}", "transfer": by, "pool_dir": str(folder)}
        async with real_worker(config, *(roles or (Role.DECODE,)), **puller) as b:
            yield a, b


async def same_pages(a: RealWorker, b: RealWorker) -> bool:
    """Whether both have the same bytes of the prompt, once they rest."""
    await b.idle()
    await a.idle()
    digests = {hashlib.sha256(worker.pages(PROMPT)).digest() for worker in (a, b)}
    return len(digests) == 1 and len(a.pages(PROMPT)) > 0


def slots_left(owner: RealWorker) -> int:
    """Of target KV on its way out."""
    return int(owner.engine._parts.stager.outlets["target"].slots.free)


def slots_free(puller: RealWorker) -> int:
    """Of target KV on its way in."""
    return int(puller.engine._parts.copiers[0]._landing.slots.free)


async def until(what: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not what():
            await asyncio.sleep(0.005)


async def serve(models: Path, pools: str) -> None:
    """Until this process is killed."""
    copy, windows = PageStaging._copy_out, 0

    def stuck(*args: Any) -> int:
        nonlocal windows
        windows += 1
        if windows > 2:  # the proof page was the first one
            time.sleep(60)
        return copy(*args)

    pretend(pytest.MonkeyPatch())
    PageStaging._copy_out = stuck  # type: ignore[method-assign]
    config = EngineConfig(
        model=str(models / "target"), draft=str(models / "head"), num_pages=128, chunk_tokens=48
    )
    config = dataclasses.replace(config, roles=(Role.PREFILL,), pool_dir=pools)
    worker = await RealWorker(config, "static:").start()
    print(worker.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
