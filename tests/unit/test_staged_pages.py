"""A Fetch of pages that the front cannot map: window by window, two at once, and every slot goes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np
import pytest

from eyas.common.errors import TransferFailed, Unavailable
from eyas.common.types import ALL_OF_RANK_0, KvKind
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import Command, PagesStaged, StagePages, UnstagePages, WireFailure
from prefill_svc import transfer
from prefill_svc.transfer import StagedPages

PAGES, PAGE, SLOTS, WINDOW = 40, 64, 6, 3


class Desk:
    """An engine that copies a window when the test says so."""

    def __init__(self) -> None:
        self.pool = np.random.default_rng(3).integers(0, 256, (PAGES, PAGE), np.uint8)
        self.slots = np.zeros((SLOTS, PAGE), np.uint8)
        self.free = list(range(SLOTS))
        self.asked: list[StagePages] = []
        self.held: dict[int, tuple[int, ...]] = {}
        self.most = 0  # windows that were not given back, at once
        self.client = EngineClient(self.send)
        self.client.accept()
        self.alone = False  # it copies at once

    def send(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, StagePages):
                self.asked.append(command)
                self.most = max(self.most, len(self.asked) + len(self.held))
                if self.alone:
                    asyncio.get_running_loop().call_soon(self.copy)
            else:
                assert isinstance(command, UnstagePages)
                self.asked = [other for other in self.asked if other.call != command.call]
                self.free += self.held.pop(command.call, ())

    def copy(self) -> None:
        if not self.asked:
            return  # it was given back before
        command = self.asked.pop(0)
        slots = tuple(self.free.pop() for _ in command.pages)
        self.held[command.call] = slots
        self.slots[list(slots)] = self.pool[list(command.pages)]
        self.client.dispatch([PagesStaged(command.call, slots)])

    def refuse(self, message: str) -> None:
        self.client.dispatch(
            [PagesStaged(self.asked.pop(0).call, failure=WireFailure("transfer_failed", message))]
        )

    def idle(self) -> bool:
        return not self.asked and not self.held and len(self.free) == SLOTS

    def fetch(self, pages: Sequence[int]):
        return StagedPages(self.client, self.slots, KvKind.TARGET, 5, ALL_OF_RANK_0, "b").chunks(pages)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "window_pages", lambda page_bytes: WINDOW)
    monkeypatch.setattr(transfer, "AHEAD", 2)
    monkeypatch.setattr("kv_transfer.backends.stream.CHUNK_BYTES", 100)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6, 7, 40])
async def test_the_bytes_of_all_pages_come_in_order(count: int) -> None:
    desk = Desk()
    desk.alone = True
    pages = [int(page) for page in np.random.default_rng(count).permutation(PAGES)[:count]]
    found = b"".join([data async for data in desk.fetch(pages)])
    assert found == desk.pool[pages].tobytes()
    assert desk.idle() and desk.most == min(2, -(-count // WINDOW))


async def test_the_next_window_is_asked_for_before_the_present_one_is_sent() -> None:
    desk = Desk()
    reading = desk.fetch(range(12))
    first = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    assert [command.pages for command in desk.asked] == [(0, 1, 2), (3, 4, 5)]
    assert {(command.group, command.handle) for command in desk.asked} == {(KvKind.TARGET, 5)}
    desk.copy()
    assert await first == desk.pool[:3].tobytes()[:100]
    desk.copy()
    assert await anext(reading) == desk.pool[:3].tobytes()[100:]
    assert not desk.asked, "a third one would be too many"
    await anext(reading)
    assert [command.pages for command in desk.asked] == [(6, 7, 8)]
    await reading.aclose()
    assert desk.idle()


@pytest.mark.parametrize("copied", [0, 1, 2])
async def test_a_stream_that_ends_early_gives_every_slot_back(copied: int) -> None:
    """Also those that come afterwards: the engine hears of it in any case."""
    desk = Desk()

    async def read() -> None:
        async with contextlib.aclosing(desk.fetch(range(40))) as reading:
            async for _ in reading:
                await asyncio.sleep(60)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    for _ in range(copied):
        desk.copy()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert desk.idle()
    desk.client.dispatch([PagesStaged(1, (0, 1, 2))])


async def test_what_the_engine_says_ends_the_stream() -> None:
    desk = Desk()
    reading = asyncio.ensure_future(anext(desk.fetch(range(12))))
    await asyncio.sleep(0)
    desk.refuse("the lease is over")
    with pytest.raises(TransferFailed, match="the lease is over"):
        await reading
    assert desk.idle()
    reading = asyncio.ensure_future(anext(desk.fetch(range(12))))
    await asyncio.sleep(0)
    desk.client.fail(Unavailable("it is gone"))
    with pytest.raises(Unavailable, match="it is gone"):
        await reading
    assert desk.idle()
    with pytest.raises(Unavailable):
        await anext(desk.fetch(range(12)))


async def test_an_engine_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STAGED_S", 0.05)
    desk = Desk()
    with pytest.raises(TransferFailed, match="staged no pages within 0.05 s"):
        await anext(desk.fetch(range(12)))
    assert desk.idle()


async def test_a_puller_that_takes_nothing_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads no more: they are another's soon."""
    monkeypatch.setattr(transfer, "TAKEN_S", 0.05)
    desk = Desk()
    desk.alone = True
    reading = desk.fetch(range(12))
    await anext(reading)
    await asyncio.sleep(0.02)
    await anext(reading)
    await asyncio.sleep(0.1)
    assert desk.idle()
    with pytest.raises(TransferFailed, match="took nothing for 0.05 s"):
        await anext(reading)
