"""New requests, and the event loop that they leave to others."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from eyas.common.errors import Cancelled, DeadlineExceeded, Overloaded
from gateway.limits import queues as pace_module
from gateway.limits.queues import LARGE_BYTES, ReadQueue
from gateway.observe.metrics import GatewayMetrics

WORK_S = 0.02


async def piece(
    pace: ReadQueue, done: list[str], name: str, size: int = LARGE_BYTES, takes_s: float = WORK_S
) -> None:
    await pace.enter(name[0], size)
    time.sleep(takes_s)
    done.append(name)


@pytest.mark.parametrize(("size", "pause_s"), [(LARGE_BYTES, WORK_S), (100, WORK_S), (100, 0.0)])
async def test_the_loop_turns_for_others_between_two_pieces(size: int, pause_s: float) -> None:
    """Whatever comes in ten pieces' time: a session that hears one message per turn hears some."""
    pace, done, turns = ReadQueue(), list[str](), list[int]()

    async def count() -> None:
        while len(done) < 10:
            turns.append(len(done))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(piece(pace, done, f"a{number}", size, pause_s) for number in range(10)))
    await counting
    assert done == [f"a{number}" for number in range(10)]
    assert min(turns.count(seen) for seen in range(1, 10)) >= pace_module.TURNS


async def test_a_small_piece_does_not_wait_behind_large_ones() -> None:
    pace, done = ReadQueue(), list[str]()
    waiting = [asyncio.create_task(piece(pace, done, f"a{n}", 9 * LARGE_BYTES)) for n in range(5)]
    await asyncio.sleep(0)
    assert len(done) == 1
    await piece(pace, done, "a small", 100)
    assert len(done) <= 3
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_next_piece_begins_behind_one_in_a_thread(leaves: bool) -> None:
    """Streams go on meanwhile. A caller that leaves does not end its piece, so others wait for it still."""
    pace, done, over = ReadQueue(), list[str](), threading.Event()

    async def long() -> bool:
        await pace.enter("a", LARGE_BYTES)
        return await pace.aside(lambda: over.wait(10) and not done.append("long"))

    first = asyncio.create_task(long())
    await asyncio.sleep(0)
    second = asyncio.create_task(piece(pace, done, "b"))
    if leaves:
        first.cancel()
    await asyncio.sleep(5 * WORK_S)  # the loop turns
    assert done == []
    over.set()
    await second
    assert done == ["long", "b"]
    assert first.cancelled() if leaves else await first


async def test_what_a_piece_in_a_thread_raises_is_its_callers() -> None:
    pace = ReadQueue()
    await pace.enter("a", LARGE_BYTES)
    with pytest.raises(ZeroDivisionError):
        await pace.aside(lambda: 1 // 0)
    async with asyncio.timeout(5):
        await piece(pace, [], "b")


async def test_a_piece_that_comes_alone_begins_at_once() -> None:
    pace = ReadQueue()
    for _ in range(3):
        with pytest.raises(StopIteration):  # it ends without giving up the loop
            pace.enter("b", 100).send(None)
        await asyncio.sleep(5 * pace_module.LEAST_REST_S)


async def test_who_leaves_or_waits_too_long_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "WAIT_S", 3 * WORK_S)
    pace, done = ReadQueue(), list[str]()
    tasks = [asyncio.create_task(piece(pace, done, f"a{number}")) for number in range(8)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError) and isinstance(answers[-1], Overloaded)
    assert "a0" in done and "a1" not in done and "a7" not in done
    await piece(pace, done, "b0")
    assert done[-1] == "b0"


async def test_who_is_seen_to_leave_waits_no_more() -> None:
    pace, done, left = ReadQueue(), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(piece(pace, done, f"a{number}")) for number in range(3)]
    await asyncio.sleep(0)
    leaving = asyncio.create_task(pace.enter("b", LARGE_BYTES, left.wait))
    staying = asyncio.create_task(pace.enter("b", LARGE_BYTES, asyncio.Event().wait))
    await asyncio.sleep(0)
    assert pace.waiting[0] == 4
    left.set()
    with pytest.raises(Cancelled, match="left before"):
        await leaving
    assert pace.waiting[0] == 3 and len(done) == 1
    await asyncio.gather(staying, *tasks)
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("client of")]


async def test_a_turn_that_comes_while_its_caller_leaves_is_passed_on() -> None:
    pace, done = ReadQueue(), list[str]()
    tasks = [asyncio.create_task(piece(pace, done, f"a{number}")) for number in range(3)]
    await asyncio.sleep(0)
    first = next(iter(pace._line._holders))
    first.cancel()  # as a task does that is cancelled, before it runs again
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["a0", "a2"]


async def test_more_work_on_what_has_entered_goes_first_and_has_a_deadline() -> None:
    pace, done = ReadQueue(), list[str]()
    tasks = [asyncio.create_task(piece(pace, done, f"a{number}")) for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded, match="waited 0.001 s"):
        await pace.go_on("a", LARGE_BYTES, 0.001)
    await pace.go_on("a", LARGE_BYTES, 5.0)
    assert len(done) < 3
    await asyncio.gather(*tasks)


async def test_what_is_too_much_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "MAX_WAITING_BYTES", 2 * LARGE_BYTES)
    pace, done = ReadQueue(), list[str]()
    names = ["a0", "a1", "a2", "a3", "b0"]
    answers = await asyncio.gather(*(piece(pace, done, name) for name in names), return_exceptions=True)
    refused = [name for name, answer in zip(names, answers, strict=True) if isinstance(answer, Overloaded)]
    assert refused == ["a2", "a3"] and sorted(done) == ["a0", "a1", "b0"]


async def test_what_waits_is_told_as_it_is_asked() -> None:
    pace, registry, done = ReadQueue(), CollectorRegistry(), list[str]()
    GatewayMetrics(registry).turns.ask(lambda: pace.waiting)

    def shown() -> tuple[float | None, float | None]:
        names = ("eyas_turn_requests", "eyas_turn_bytes")
        return registry.get_sample_value(names[0]), registry.get_sample_value(names[1])

    assert shown() == (0, 0)
    tasks = [
        asyncio.create_task(piece(pace, done, f"a{number}", LARGE_BYTES + number)) for number in range(3)
    ]
    tasks.append(asyncio.create_task(pace.go_on("b", 2 * LARGE_BYTES, 5.0)))
    await asyncio.sleep(0)
    assert len(done) == 1 and shown() == (3, 4 * LARGE_BYTES + 3)
    await asyncio.gather(*tasks)
    assert shown() == (0, 0)
