"""A request's life against scripted workers over real gRPC: admission, tokens, choices, cancellation."""

from __future__ import annotations

import asyncio

import pytest
from scripted_backend import each
from scripted_cluster import (
    DECODE,
    DRAFT,
    PREFILL,
    UNIFIED,
    collect,
    gateway,
    make_request,
    nothing_in_flight,
    until,
)
from scripted_worker import ScriptedWorker, expected, token, workers

from eyas.common.cluster.discovery import registry
from eyas.common.errors import ConfigError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from eyas.common.types import FinishCause, GenerationRequest
from gateway.backends.delivery import MAX_BUFFERED_STEPS
from gateway.backends.generate import ClusterBackend


async def test_unified_worker_gets_one_submit() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        request = make_request()
        assert not backend.health().problem
        assert await collect(await backend.start(request)) == {0: expected(request)}
        (submit,) = started[0].of("submit")
        assert (submit.attempt, submit.source) == (1, 2)
        assert {kind for kind, _ in started[0].heard} == {"submit"}
        await until(lambda: nothing_in_flight(cluster))


@pytest.mark.parametrize("n", [1, 3])
async def test_split_legs_share_one_attempt(n: int) -> None:
    async with workers(PREFILL, DECODE, DRAFT) as started, gateway(started) as (backend, _):
        prefill, decode, _ = started
        request = make_request(n=n)
        stream = await backend.start(request)
        outputs = await collect(stream)
        assert outputs == {i: expected(request, i) for i in range(n)}
        (asked,), (attach,) = prefill.of("prefill"), decode.of("attach")
        assert asked.offer_draft and asked.attempt == attach.attempt == 1
        assert attach.handles[0].worker == prefill.address
        assert prefill.prefills_cancelled == 0
        await stream.aclose()
        assert not decode.of("cancel")  # it ended by itself


async def test_token_0_does_not_wait_for_decode() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        started[1].script.stop_at = 0  # decode never says a token
        stream = await backend.start(make_request())
        entry = await asyncio.wait_for(anext(each(stream)), 30)
        assert (entry.index, entry.tokens) == (0, (token((1, 2, 3), 0, 0),))
        assert entry.timings is not None and entry.timings.prefill_ms == 1.0
        await stream.aclose()
        await until(lambda: len(started[1].of("cancel")) == 1)


async def test_choices_that_finish_at_token_0_never_join() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        for worker in started:
            worker.script.finish_first = (0, 2)
        request = make_request(n=3)
        outputs = await collect(await backend.start(request))
        assert outputs == {0: expected(request, 0)[:1], 1: expected(request, 1), 2: expected(request, 2)[:1]}
        started[0].script.finish_first = (0,)
        one = make_request("one")
        stream = await backend.start(one)
        (entry,) = await stream.take()
        assert entry.finish is FinishCause.STOP and await collect(stream) == {}
        await until(lambda: [c.id for c in started[1].of("cancel")] == ["r", "one"])


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_refusal_cancels_the_other_leg(leg: str) -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, cluster):
        prefill, decode = started
        if leg == "prefill":
            prefill.script.refuse_prefill = Overloaded("the queue is full")
        else:
            decode.script.refuse_submit = Overloaded("the queue is full")
            prefill.script.hold_prefill_at = "admitted"
        with pytest.raises(Overloaded, match="queue is full"):
            await backend.start(make_request())
        if leg == "prefill":
            await until(lambda: len(decode.of("cancel")) == 1)
        else:
            await until(lambda: prefill.prefills_cancelled == len(prefill.of("prefill")))
        await until(lambda: nothing_in_flight(cluster))


async def test_a_bad_request_is_not_tried_elsewhere() -> None:
    async with workers(UNIFIED, UNIFIED) as started, gateway(started) as (backend, _):
        for worker in started:
            worker.script.refuse_submit = InvalidRequest("max_tokens is too large", param="max_tokens")
        with pytest.raises(InvalidRequest) as caught:
            await backend.start(make_request())
        assert caught.value.param == "max_tokens"
        assert sum(len(worker.of("submit")) for worker in started) == 1


@pytest.mark.parametrize("hold", ["admitted", "started", ""])
async def test_cancel_reaches_both_legs(hold: str) -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, cluster):
        prefill, decode = started
        prefill.script.hold_prefill_at = hold
        stream = await backend.start(make_request(tokens=100_000))
        if not hold:
            await stream.take()
        await stream.cancel()
        await stream.cancel()
        await until(lambda: len(decode.of("cancel")) == 1)
        if hold:
            await until(lambda: prefill.prefills_cancelled == 1)
        await until(lambda: nothing_in_flight(cluster))
        assert len([entry async for entry in each(stream)]) < 1000  # it ends


async def test_cancelling_start_cancels_the_legs() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, cluster):
        prefill, decode = started
        prefill.script.silent = True  # not even Admitted
        starting = asyncio.create_task(backend.start(make_request()))
        await until(lambda: bool(prefill.of("prefill") and decode.of("submit")))
        assert not starting.done() and not nothing_in_flight(cluster)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: prefill.prefills_cancelled == 1 and len(decode.of("cancel")) == 1)
        await until(lambda: nothing_in_flight(cluster))


async def test_a_leg_counts_the_sequences_that_its_worker_reports() -> None:
    """One for each choice that is decoded there, one for the prompt: the unit of their loads."""
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, cluster):
        prefill, decode = started
        prefill.script.hold_prefill_at = "started"
        stream = await backend.start(make_request(n=3))
        in_flight = {candidate.info.worker: candidate.in_flight for candidate in cluster.candidates()}
        assert in_flight == {prefill.address: 1, decode.address: 3}
        await stream.cancel()
        await until(lambda: nothing_in_flight(cluster))


async def test_cancel_one_choice() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, _):
        request = make_request(n=2)
        stream = await backend.start(request)
        await stream.cancel(1)
        outputs = await collect(stream)
        assert outputs[0] == expected(request, 0)
        assert len(outputs.get(1, [])) < request.params.max_tokens
        (cancel,) = started[0].of("cancel")
        assert (cancel.id, cancel.choice) == ("r", 1)


async def test_deadline() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, _):
        started[0].script.stop_at = 4
        stream = await backend.start(make_request(timeout_s=0.5))
        with pytest.raises(DeadlineExceeded, match="longer than 0.5 s"):
            await collect(stream)
        await until(lambda: len(started[0].of("cancel")) == 1)


async def test_a_slow_reader_is_cut_off_and_its_neighbour_is_not() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, _):
        started[0].script.step_s = 0
        slow = await backend.start(make_request("slow", tokens=4 * MAX_BUFFERED_STEPS))
        quick = make_request("quick", tokens=3 * MAX_BUFFERED_STEPS)
        assert await collect(await backend.start(quick)) == {0: expected(quick)}
        await until(lambda: [c.id for c in started[0].of("cancel")] == ["slow"])
        with pytest.raises(Exception, match="reads too slowly"):
            await collect(slow)


async def test_requests_spread_over_decode_workers() -> None:
    async with workers(PREFILL, DECODE, DECODE) as started, gateway(started) as (backend, _):
        requests = [make_request(f"r{i}") for i in range(8)]
        outputs = await asyncio.gather(*(_run(backend, request) for request in requests))
        assert outputs == [{0: expected(request)} for request in requests]
        assert [len(worker.of("submit")) for worker in started[1:]] == [4, 4]


async def _run(backend: ClusterBackend, request: GenerationRequest) -> dict[int, list[int]]:
    return await collect(await backend.start(request))


async def test_another_model_gets_no_requests() -> None:
    mine = await ScriptedWorker(UNIFIED).start()
    other = await ScriptedWorker(UNIFIED, fingerprint="model-b").start()
    async with gateway([mine, other]) as (backend, _):
        assert [info.worker for info in await backend.models()] == [mine.address]
        await asyncio.gather(*(_run(backend, make_request(f"r{i}")) for i in range(4)))
        assert not other.heard
    await asyncio.gather(mine.kill(), other.kill())


async def test_no_prefill_worker_is_unavailable() -> None:
    async with workers(DECODE) as started, gateway(started) as (backend, _):
        assert "no prefill worker" in backend.health().problem
        with pytest.raises(Unavailable, match="no worker can serve"):
            await backend.start(make_request())


def test_a_bad_registry_names_the_flag() -> None:
    for spec in ("etcd:x", "static:nohost", "static:host:port", "redis://", "redis://host:port"):
        with pytest.raises(ConfigError, match="registry"):
            registry(spec)
