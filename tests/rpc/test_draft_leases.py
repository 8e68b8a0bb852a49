"""Draft KV that a draft worker was to pull: when that worker falls, its pages are free at once."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from real_worker import decoding, prefill, real_worker, tiny_config
from scripted_cluster import until

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role

PROMPT = tuple(range(3, 133))


@pytest.mark.parametrize("watched", [pytest.param(True, marks=pytest.mark.slow), False])
async def test_the_lease_of_draft_pages_ends_with_the_worker_that_was_to_pull_them(
    tmp_path: Path, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft worker has no page to spare, and gives its pull up; or it never comes to open its Watch."""
    config = tiny_config(tmp_path / "models")
    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as drafting:
        start = stack.enter_async_context
        a = await start(real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "a")))
        known = f"static:{a.address}"
        drafter = real_worker(config, Role.DRAFT, registry=known, pool_dir=str(tmp_path / "d"))
        d = await drafting.enter_async_context(drafter)
        monkeypatch.setattr(d.engine._sequences, "lend", lambda owner, handle: None)
        if not watched:
            monkeypatch.setattr(d.engine._parts.pulls, "open", lambda *_: None)
        known += f",{d.address}"
        b = await start(real_worker(config, Role.DECODE, registry=known, pool_dir=str(tmp_path / "b")))
        decode = await start(decoding(b))
        await until(lambda: bool(b.engine._drafting.drafter._head._workers))
        asked = GenerationRequest("r", PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))
        decode.attach(asked, await prefill(a, asked, draft=True))
        await until(lambda: b.load.running == 1 and (watched or a.load.leases == 1))
        await drafting.aclose()
        await until(lambda: a.load.leases == 0 and a.load.pages_used == 0)
