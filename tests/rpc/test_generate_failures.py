"""A request outlives its workers: lost pages, dead prefills, dead decodes; no token twice, none missing."""

from __future__ import annotations

import asyncio

import pytest
from scripted_backend import each, first
from scripted_cluster import (
    DECODE,
    PREFILL,
    UNIFIED,
    collect,
    gateway,
    make_request,
    until,
)
from scripted_worker import ScriptedWorker, expected, workers

from eyas.common.cluster import roster
from eyas.common.errors import EyasError, Overloaded, Unavailable
from eyas.common.types import FinishCause, TokenEntry
from eyas.common.wire.message import PagesLost
from gateway.backends import generate, retries, sessions
from gateway.routing import cluster as cluster_module
from tests.rpc.scripted_cluster import collect_after


async def test_lost_pages_before_token_0_take_another_prefill() -> None:
    async with workers(PREFILL, PREFILL, DECODE) as started, gateway(started) as (backend, _):
        *prefills, decode = started
        for prefill in prefills:
            prefill.script.hold_prefill_at = "started"
        decode.script.lose, decode.script.lose_after_s = 1, 0.1
        request = make_request()
        stream = await backend.start(request)
        await until(lambda: len(decode.of("attach")) == 1)
        for prefill in prefills:
            prefill.script.hold_prefill_at = ""
        assert await collect(stream) == {0: expected(request)}
        first, second = decode.of("attach")
        assert (first.attempt, second.attempt) == (1, 2)
        assert first.handles[0].worker != second.handles[0].worker and not second.first_tokens
        assert sorted(asked.attempt for p in prefills for asked in p.of("prefill")) == [1, 2]


async def test_lost_pages_after_token_0_are_recomputed_by_decode() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        decode.script.lose, decode.script.lose_after_s = 1, 0.1
        request = make_request(n=2)
        assert await collect(await backend.start(request)) == {i: expected(request, i) for i in range(2)}
        _, second = decode.of("attach")
        assert second.attempt == 2 and not second.handles
        assert [first.token for first in second.first_tokens] == [expected(request, i)[0] for i in range(2)]
        assert len(prefill.of("prefill")) == 1


async def test_an_abort_ends_what_its_worker_has_lost_the_pages_of() -> None:
    """The worker ended the request before it heard of the next attempt, of which it then knows nothing."""
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, cluster):
        decode = started[1]
        decode.script.stop_at = 0
        request = make_request()
        stream = await backend.start(request)
        await until(lambda: len(decode.of("attach")) == 1)
        await until(lambda: stream.tokens == 1)
        listener = cluster.session(decode.address)._listeners["r"]
        listener.on_reply(PagesLost("r", 1))
        await until(lambda: len(decode.of("attach")) == 2)
        listener.on_entry(TokenEntry("r", 1, 0, 0, (), finish=FinishCause.ABORT))
        first, last = [entry async for entry in each(stream)]
        assert first.tokens == tuple(expected(request)[:1])
        assert (last.tokens, last.finish) == ((), FinishCause.ABORT)


async def test_pages_that_never_arrive_are_computed_by_decode() -> None:
    """A worker that failed to hand them over is not asked again: a stopped one costs seconds each time."""
    async with workers(PREFILL, PREFILL, DECODE) as started, gateway(started) as (backend, _):
        *prefills, decode = started
        for prefill in prefills:
            prefill.script.hold_prefill_at = "started"
        decode.script.lose = 100
        request = make_request()
        assert await collect(await backend.start(request)) == {0: expected(request)}
        assert [bool(attach.handles) for attach in decode.of("attach")] == [True, True, False]
        assert [len(prefill.of("prefill")) for prefill in prefills] == [1, 1]


async def test_lost_again_and_again_ends_in_an_error() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, cluster):
        started[1].script.stop_at = 0
        stream = await backend.start(make_request())
        await until(lambda: len(started[1].of("attach")) == 1)
        listener = cluster.session(started[1].address)._listeners["r"]
        for attempt in range(1, 2 + retries.MAX_RETRIES):
            await until(lambda n=attempt: len(started[1].of("attach")) == n)
            listener.on_reply(PagesLost("r", attempt))
        with pytest.raises(Unavailable, match="could not be transferred"):
            await collect(stream)


async def test_stale_and_repeated_messages_change_nothing() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, cluster):
        prefill, decode = started
        decode.script.lose, decode.script.lose_after_s = 1, 0.1
        decode.script.stop_at = 6
        request = make_request()
        stream = await backend.start(request)
        await until(lambda: len(decode.of("attach")) == 2)
        listener = cluster.session(decode.address)._listeners["r"]
        listener.on_reply(PagesLost("r", 1))  # late: attempt 2 runs
        listener.on_entry(TokenEntry("r", 1, 0, 6, (-1,)))  # of the lost attempt
        got = await first(stream, 4)
        assert [t for entry in got for t in entry.tokens] == expected(request)[:6]
        listener.on_entry(TokenEntry("r", 2, 0, 4, (-1, -1)))  # repeated
        listener.on_entry(
            TokenEntry("r", 2, 0, 4, (-1, -1, 7), finish=FinishCause.STOP)
        )  # one of three is new
        (last,) = [entry async for entry in each(stream)]
        assert (last.index, last.tokens, last.finish) == (6, (7,), FinishCause.STOP)
        assert len(decode.of("attach")) == 2


@pytest.mark.parametrize("after", ["admitted", "started"])
async def test_a_prefill_that_ends_early(after: str) -> None:
    """Before `Started` it is sent elsewhere; later only decode judges (here its pages did arrive)."""
    async with workers(PREFILL, PREFILL, DECODE) as started, gateway(started) as (backend, _):
        first, second, decode = started
        first.script.fail_prefill_after = after
        request = make_request()
        assert await collect(await backend.start(request)) == {0: expected(request)}
        assert len(second.of("prefill")) == (after == "admitted")
        (attach,) = decode.of("attach")
        owner = second if after == "admitted" else first
        assert attach.handles[0].worker == owner.address
        assert attach.attempt == (2 if after == "admitted" else 1)


async def test_without_another_prefill_an_admitted_request_is_computed_by_decode() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        prefill.script.hold_prefill_at = "admitted"
        request = make_request()
        stream = await backend.start(request)
        await prefill.kill()
        assert await collect(stream) == {0: expected(request)}
        (attach,) = decode.of("attach")
        assert not attach.handles and not attach.first_tokens


async def test_without_any_prefill_a_request_is_computed_by_decode() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        prefill.script.refuse_prefill = Unavailable("draining")
        request = make_request()
        assert await collect(await backend.start(request)) == {0: expected(request)}
        (attach,) = decode.of("attach")
        assert not attach.handles and not attach.first_tokens


async def test_a_moment_without_workers_is_waited_out() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        await started[0].kill()
        await until(lambda: not cluster.session(started[0].address).connected)
        request = make_request()
        asking = asyncio.create_task(backend.start(request))
        await asyncio.sleep(0.5)
        returned = await ScriptedWorker(UNIFIED).start(int(started[0].address.rpartition(":")[2]))
        assert await collect(await asking) == {0: expected(request)}
        await returned.kill()


async def test_a_worker_that_refuses_sessions_is_not_connected() -> None:
    """It is asked less and less often, and no refused call leaves a task behind."""
    async with workers(UNIFIED, UNIFIED) as started, gateway(started) as (backend, cluster):
        refusing, other = started
        refusing.script.refuse_session = Unavailable("the engine made no progress")
        session = cluster.session(refusing.address)
        refusing.end_sessions()
        await until(lambda: not session.connected)
        deadline = asyncio.get_running_loop().time() + 2.0
        while asyncio.get_running_loop().time() < deadline:
            assert not session.connected
            await asyncio.sleep(0.005)
        assert 2 <= len(refusing.of("refused")) <= 6
        writers = [t for t in asyncio.all_tasks() if "_consume_request_iterator" in repr(t.get_coro())]
        assert len(writers) <= len(started)
        request = make_request()
        assert await collect(await backend.start(request)) == {0: expected(request)}
        assert not refusing.of("submit") and len(other.of("submit")) == 1


async def test_a_prefill_killed_after_its_end_costs_nothing() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        request = make_request(tokens=60)
        stream = await backend.start(request)
        got = await first(stream, 1)
        await started[0].kill()
        assert await collect_after(got, stream) == {0: expected(request)}


@pytest.mark.parametrize("roles", [[PREFILL, DECODE, DECODE], [UNIFIED, UNIFIED]])
async def test_decode_killed_in_the_middle(roles: list[tuple]) -> None:
    """The stream goes on elsewhere from the delivered ids, with the tokens it would have had."""
    async with workers(*roles) as started, gateway(started) as (backend, _):
        decodes = started[-2:]
        for worker in decodes:
            worker.script.stop_at = 10
        request = make_request(tokens=40, n=2)
        stream = await backend.start(request)
        got = await first(stream, 6)
        (dying,) = [worker for worker in decodes if worker.of("submit")]
        (heir,) = [worker for worker in decodes if worker is not dying]
        heir.script.stop_at = None
        await dying.kill()
        assert await collect_after(got, stream) == {i: expected(request, i) for i in range(2)}
        (submit,) = heir.of("submit")
        assert (submit.attempt, submit.source) == (2, 2)
        for choice in submit.request.choices:
            assert list(choice.output_ids) == expected(request, choice.index)[: len(choice.output_ids)]
            assert len(choice.output_ids) >= 4


async def test_decode_killed_before_its_first_step_reuses_the_pages() -> None:
    async with workers(PREFILL, DECODE, DECODE) as started, gateway(started) as (backend, _):
        prefill, *decodes = started
        for worker in decodes:
            worker.script.stop_at = 0
        request = make_request()
        stream = await backend.start(request)
        await until(lambda: any(worker.of("attach") for worker in decodes))
        (dying,) = [worker for worker in decodes if worker.of("attach")]
        (heir,) = [worker for worker in decodes if worker is not dying]
        heir.script.stop_at = None
        await dying.kill()
        assert await collect(stream) == {0: expected(request)}
        assert dying.of("attach")[0].handles == heir.of("attach")[0].handles
        assert heir.of("attach")[0].attempt == 2 and len(prefill.of("prefill")) == 1


async def test_the_last_decode_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had its time to return: the request is told what is missing, and why."""
    for module, name in ((cluster_module, "PATIENCE_S"), (roster, "RETURN_S"), (roster, "POLL_S")):
        monkeypatch.setattr(module, name, 0.5)
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        stream = await backend.start(make_request(tokens=100_000))
        got = await first(stream, 1)
        await started[0].kill()
        with pytest.raises(Unavailable, match="no decode worker is serving, after worker .* was lost"):
            await asyncio.wait_for(collect_after(got, stream), 30)
        assert not await backend.models() and not cluster.returning()


async def test_a_worker_that_returns_takes_its_requests_back() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, _):
        started[0].script.stop_at = 10
        request = make_request(tokens=40)
        stream = await backend.start(request)
        got = await first(stream, 5)
        await started[0].kill()
        returned = await ScriptedWorker(UNIFIED).start(int(started[0].address.rpartition(":")[2]))
        assert await collect_after(got, stream) == {0: expected(request)}
        await returned.kill()


async def test_token_0_does_not_wait_for_another_decode() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        prefill.script.hold_prefill_at, decode.script.stop_at = "started", 0
        request = make_request()
        stream = await backend.start(request)
        decode.script.starting = True
        decode.end_sessions()
        await until(lambda: stream._decode is None)
        prefill.script.released.set()
        (entry,) = await asyncio.wait_for(first(stream, 1), 20)
        assert (entry.index, list(entry.tokens)) == (0, expected(request)[:1])
        decode.script.starting, decode.script.stop_at = False, None
        assert await collect_after([entry], stream) == {0: expected(request)}
        assert [submit.request.begun for submit in decode.of("submit")] == [False, True]


async def test_a_stream_that_has_begun_is_not_refused_for_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks a full worker again and again, and says that it has a place by right."""
    monkeypatch.setattr(generate, "RETRY_PAUSE_S", 0.05)
    async with workers(UNIFIED, UNIFIED) as started, gateway(started) as (backend, _):
        for worker in started:
            worker.script.stop_at = 10
        request = make_request(tokens=40)
        stream = await backend.start(request)
        got = await first(stream, 5)
        (dying,) = [worker for worker in started if worker.of("submit")]
        (heir,) = [worker for worker in started if worker is not dying]
        heir.script.stop_at, heir.script.refuse_submit = None, Overloaded("full")
        await dying.kill()
        await until(lambda: len(heir.of("submit")) > 2 * retries.MAX_RETRIES)
        heir.script.refuse_submit = None
        assert await collect_after(got, stream) == {0: expected(request)}
        assert all(submit.request.begun for submit in heir.of("submit"))
        assert not dying.of("submit")[0].request.begun


async def test_a_request_that_fails_whatever_runs_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each of its workers gives a token before it fails."""
    monkeypatch.setattr(generate, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(retries, "MAX_IN_ALL", 3)
    async with workers(UNIFIED, UNIFIED) as started, gateway(started) as (backend, _):
        for worker in started:
            worker.script.tokens_a_step, worker.script.stop_at = 1, 1
        stream = await backend.start(make_request(tokens=40))
        with pytest.raises(Unavailable):
            for tokens in range(1, 41):
                await asyncio.wait_for(first(stream, 1), 30)
                for worker in started:
                    worker.script.stop_at = 1 + tokens
                    worker.end_sessions()
        # A session that ends as a request is sent to it may never show it.
        assert 2 <= sum(len(worker.of("submit")) for worker in started) <= 4


async def test_a_silent_worker_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SILENCE_S", 0.6)
    async with workers(UNIFIED, UNIFIED) as started, gateway(started) as (backend, _):
        for worker in started:
            worker.script.stop_at = 10
        request = make_request(tokens=30)
        stream = await backend.start(request)
        (dying,) = [worker for worker in started if worker.of("submit")]
        (heir,) = [worker for worker in started if worker is not dying]
        heir.script.stop_at = None
        dying.script.muted = True  # its sockets stay open
        assert await collect(stream) == {0: expected(request)}


async def test_a_draining_worker_sends_its_requests_away() -> None:
    async with workers(UNIFIED, UNIFIED) as started, gateway(started) as (backend, _):
        started[0].script.refuse_submit = Unavailable("draining")
        request = make_request()
        assert await collect(await backend.start(request)) == {0: expected(request)}
        started[1].script.refuse_submit = Overloaded("full")
        with pytest.raises((Overloaded, Unavailable)):
            await backend.start(make_request("again"))


async def test_a_skipped_index_is_an_error_not_a_hole() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        started[0].script.stop_at = 2
        stream = await backend.start(make_request())
        await stream.take()
        cluster.session(started[0].address)._listeners["r"].on_entry(TokenEntry("r", 1, 0, 5, (7,)))
        with pytest.raises(EyasError, match="skipped from output index 2 to 5"):
            await stream.take()
        await until(lambda: len(started[0].of("cancel")) == 1)
