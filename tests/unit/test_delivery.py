"""Delivery: whatever workers repeat, each index reaches the reader once and in order."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.common.errors import Cancelled, EyasError, Unavailable
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    PromptTokenLogprobs,
    RequestChoice,
    TokenEntry,
    TokenLogprob,
)
from gateway.backends.base import FastPath
from gateway.backends.delivery import MAX_TAKEN, OutputBuffer


def entry(index: int, *tokens: int, choice: int = 0, finish: FinishCause | None = None) -> TokenEntry:
    logprobs = tuple(TokenLogprob(-float(token)) for token in tokens)
    return TokenEntry("r", 1, choice, index, tokens, logprobs, finish)


async def drain(delivery: OutputBuffer) -> list[TokenEntry]:
    entries: list[TokenEntry] = []
    while taken := await asyncio.wait_for(delivery.take(), 30):
        entries += taken
    return entries


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=30))
def test_overlaps_are_trimmed(pieces: list[tuple[int, int]]) -> None:
    """Any pieces of 0, 1, 2, ... that leave no hole come out as 0, 1, 2, ... each once."""

    async def run() -> None:
        delivery = OutputBuffer([RequestChoice(0)])
        known = 0
        for start, length in pieces:
            if start <= known:
                delivery.push(entry(start, *range(start, start + length)))
                known = max(known, start + length)
        delivery.push(entry(known, finish=FinishCause.STOP))
        entries = await drain(delivery)
        tokens = [token for e in entries for token in e.tokens]
        assert tokens == list(range(known))
        assert [-logprob.logprob for e in entries for logprob in e.logprobs] == tokens
        assert [e.finish for e in entries if e.finish] == [FinishCause.STOP]
        assert all(e.tokens[0] == e.index for e in entries if e.tokens)

    asyncio.run(run())


async def test_what_was_asked_of_the_prompt_comes_once() -> None:
    """Prefill says it with token 0, and decode repeats both; a cancelled choice may bring it."""
    delivery = OutputBuffer([RequestChoice(0), RequestChoice(1)])
    delivery.close(1)
    told = msgspec.structs.replace(entry(0, 5, choice=1), prompt=PromptTokenLogprobs(1))
    delivery.push(told)
    delivery.push(msgspec.structs.replace(told, choice=0, tokens=(5, 6), finish=FinishCause.STOP))
    first, second = await drain(delivery)
    assert (first.prompt, first.tokens) == (PromptTokenLogprobs(1), ())
    assert (second.prompt, second.tokens) == (None, (5, 6))


async def test_a_resumed_choice_goes_on_from_its_ids() -> None:
    delivery = OutputBuffer([RequestChoice(0, (5, 6)), RequestChoice(1)])
    delivery.push(entry(1, 6, 7))
    assert [e.tokens for e in await delivery.take()] == [(7,)]
    delivery.push(entry(0, 9, choice=1, finish=FinishCause.STOP))
    assert delivery.unfinished() == (RequestChoice(0, (5, 6, 7)),)
    assert not delivery.complete
    delivery.close(0)
    assert delivery.complete and [e.choice for e in await drain(delivery)] == [1]


async def test_nothing_after_the_finish() -> None:
    delivery = OutputBuffer([RequestChoice(0)])
    delivery.push(entry(0, 1, finish=FinishCause.LENGTH))
    delivery.push(entry(1, 2))
    assert [e.tokens for e in await drain(delivery)] == [(1,)]


async def test_a_hole_is_an_error_after_what_came_before_it() -> None:
    delivery = OutputBuffer([RequestChoice(0)])
    delivery.push(entry(0, 1))
    delivery.push(entry(2, 3))
    delivery.push(entry(1, 2))
    assert [e.tokens for e in await delivery.take()] == [(1,)]
    with pytest.raises(EyasError, match="from output index 1 to 2"):
        await delivery.take()


async def test_a_slow_reader_is_ended_and_its_buffer_freed() -> None:
    delivery = OutputBuffer([RequestChoice(0)], limit=3)
    for index in range(5):
        delivery.push(entry(index, 1))
    assert delivery.over
    with pytest.raises(Cancelled, match="too slowly: 3 steps"):
        await delivery.take()


async def test_the_first_end_stands_and_wakes_the_reader() -> None:
    delivery = OutputBuffer([RequestChoice(0)])
    reader = asyncio.create_task(delivery.take())
    await asyncio.sleep(0)
    delivery.end(Unavailable("gone"))
    delivery.end()
    with pytest.raises(Unavailable, match="gone"):
        await reader


async def test_timings_come_through_without_their_tokens() -> None:
    """Decode repeats token 0 and says how the transfer went; a choice may have ended at prefill by then."""
    timings = EngineTimings(transfer_ms=1.0)
    delivery = OutputBuffer([RequestChoice(0), RequestChoice(1)])
    delivery.push(entry(0, 5, finish=FinishCause.STOP))
    delivery.push(entry(0, 6, choice=1))
    for choice in (0, 1):
        told = msgspec.structs.replace(entry(0, 5 + choice, choice=choice), accepted=1, offered=2)
        delivery.push(msgspec.structs.replace(told, timings=timings))
    delivery.close(1)
    entries = await drain(delivery)
    assert [e.tokens for e in entries] == [(5,), (6,), (), ()]
    assert [e.timings for e in entries[2:]] == [timings, timings]
    assert entries[2].offered == 0 and delivery.tokens == 2


class Told(FastPath):
    """Takes all entries but last ones."""

    def __init__(self, told: list[TokenEntry]) -> None:
        self._told = told

    def offer(self, entry: TokenEntry, now: float) -> bool:
        if entry.finish is None:
            self._told.append(entry)
        return entry.finish is None


async def test_a_lane_gets_entries_only_while_the_reader_waits() -> None:
    """Otherwise it could overtake what the reader has taken and not yet dealt with."""
    delivery, told = OutputBuffer([RequestChoice(0)]), list[TokenEntry]()

    delivery.use_lanes(lambda choice: Told(told))
    delivery.push(entry(0, 1))
    assert [e.tokens for e in await delivery.take()] == [(1,)]
    delivery.push(entry(1, 2))  # the reader deals with the first one
    assert [e.tokens for e in await delivery.take()] == [(2,)] and not told
    reading = asyncio.create_task(delivery.take())
    await asyncio.sleep(0)
    for index in range(3):  # the first of them is known already
        delivery.push(entry(1 + index, 2 + index))
    assert [e.tokens for e in told] == [(3,), (4,)] and not reading.done()
    delivery.push(entry(4, 5, finish=FinishCause.STOP))
    delivery.push(entry(5, 6))
    assert [e.tokens for e in await reading] == [(5,)] and len(told) == 2
    assert await delivery.take() == () and delivery.tokens == 5


async def test_a_lane_that_cannot_begin_ends_the_delivery_and_nothing_else() -> None:
    """Other requests' entries come by the same call."""
    delivery = OutputBuffer([RequestChoice(0)])
    delivery.use_lanes(lambda choice: 1 // 0)
    delivery.push(entry(0, 1))
    with pytest.raises(EyasError, match="internal error"):
        await delivery.take()


async def test_a_reader_that_went_away_leaves_no_lane_open() -> None:
    delivery = OutputBuffer([RequestChoice(0)])
    delivery.use_lanes(lambda choice: Told([]))
    reading = asyncio.create_task(delivery.take())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    delivery.push(entry(0, 1))
    assert [e.tokens for e in await delivery.take()] == [(1,)]


async def test_a_reader_that_comes_back_gets_a_part_at_a_time() -> None:
    delivery = OutputBuffer([RequestChoice(0)])
    for index in range(MAX_TAKEN + 2):
        delivery.push(entry(index, 1))
    assert [len(await delivery.take()) for _ in range(2)] == [MAX_TAKEN, 2]
