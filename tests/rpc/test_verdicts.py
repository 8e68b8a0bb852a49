"""The verdict on what was read: seen on the board by pullers of the owner's host, asked for by all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_worker import decoding, prefill, tiny_config
from staged_rig import pair, request

from eyas.common.config import EngineConfig
from eyas.common.wire import message
from kv_transfer.lease_board import LeaseBoardView
from prefill_svc.transfer import TransferServicer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every Release that an owner hears of: does it go one way?"""
    found: list[bool] = []
    plain = TransferServicer.Release

    async def release(servicer: TransferServicer, wanted: Any, context: Any) -> Any:
        found.append(wanted.one_way)
        return await plain(servicer, wanted, context)

    monkeypatch.setattr(TransferServicer, "Release", release)
    return found


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_verdict_is_asked_for_only_where_it_cannot_be_seen(
    config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    released: list[bool],
    elsewhere: bool,
) -> None:
    if elsewhere:
        monkeypatch.setattr(LeaseBoardView, "find", lambda export, folder: None)
    async with pair(config, tmp_path, "shm") as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        tokens, path = await decode.tokens()
        assert len(tokens) == 12 and path == "shm"
        await b.idle()
        await a.idle()
    assert released and all(one_way != elsewhere for one_way in released)


async def test_pages_whose_lease_was_struck_out_are_not_used(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeaseBoardView, "holds", lambda view, lease: False)
    async with pair(config, tmp_path, "shm") as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        assert (await decode.next(message.PagesLost)).id == "r0"
