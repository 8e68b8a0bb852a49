"""Limits of API keys over HTTP and gRPC, and a full backend that callers share."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, ScriptedStream, each, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.errors import DeadlineExceeded, Overloaded, RateLimited
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.common.wire import rpc
from gateway.grpc.front import GrpcFront
from gateway.http.front import create_app
from gateway.limits.fair import FairBackend
from gateway.limits.keys import KeyRing
from gateway.limits.quotas import CallerLimits, CallerQuotas, KeyLimits
from gateway.observe.metrics import GatewayMetrics

CONFIG = GatewayConfig(grpc_port=0, api_keys=("rich", "poor"))
POOR = KeyRing(CONFIG).caller({"authorization": "Bearer poor"}).name
BODY = {"model": "eyas-nano", "prompt": "Hi", "max_tokens": 8}


@contextlib.asynccontextmanager
async def fronts(
    limits: CallerLimits, pause_s: float = 0.0
) -> AsyncIterator[tuple[httpx.AsyncClient, grpc.aio.Channel, CallerQuotas]]:
    backend, quotas = ScriptedBackend(nano_tokenizer(), pause_s=pause_s), CallerQuotas(limits)
    given = (CONFIG, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()), quotas)
    front = GrpcFront(*given)
    await front.start()
    transport = httpx.ASGITransport(create_app(*given))
    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=10) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel,
        ):
            yield http, channel, quotas
    finally:
        await front.aclose()


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(http: httpx.AsyncClient, key: str, **more: object) -> httpx.Response:
    return await http.post("/v1/completions", json=BODY | more, headers=by(key))


async def generate(channel: grpc.aio.Channel, key: str) -> grpc.aio.Call:
    metadata = tuple(by(key).items())
    call = channel.unary_stream("/eyas.v1.Eyas/Generate")(b"\x12\x02Hi", metadata=metadata, timeout=5)
    async for _ in call:
        pass
    return call


async def test_a_key_has_its_rate_on_both_fronts_together() -> None:
    async with fronts(CallerLimits(keys={POOR: KeyLimits(requests_per_minute=3)})) as (http, channel, _):
        response = await ask(http, "poor", stream=True)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "3"
        assert response.headers["x-ratelimit-remaining-requests"] == "2"
        told = dict(await (await generate(channel, "poor")).initial_metadata())
        assert told["x-ratelimit-remaining-requests"] == "1"
        wrong = await http.post("/v1/completions", json={}, headers=by("poor"))
        assert wrong.status_code == 400  # it counts: it is answered
        refused = await ask(http, "poor")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) in range(15, 21)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, "poor")
        assert type(rpc.map_rpc_error(caught.value)) is RateLimited
        assert int(dict(caught.value.trailing_metadata() or ())["retry-after"]) in range(15, 21)
        # What makes no tokens is free, and so is another key.
        assert (await http.get("/v1/models", headers=by("poor"))).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "Hi"}, headers=by("poor"))).status_code == 200
        models = channel.unary_unary("/eyas.v1.Eyas/Models")
        await models(b"", metadata=tuple(by("poor").items()))
        rich = await ask(http, "rich")
        assert rich.status_code == 200 and not [name for name in rich.headers if "ratelimit" in name]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompt_and_answer_are_paid(stream: bool) -> None:
    async with fronts(CallerLimits(KeyLimits(tokens_per_minute=1000))) as (http, channel, quotas):
        usage = (await ask(http, "poor")).json()["usage"]["total_tokens"]
        left = 1000 - usage
        account = quotas.accounts.of(POOR)
        assert account.tokens is not None
        assert left <= account.tokens.level(quotas.accounts.clock()) < left + 10
        await ask(http, "poor", stream=stream)
        assert left - usage <= account.tokens.level(quotas.accounts.clock()) < left - usage + 10
        before = account.tokens.level(quotas.accounts.clock())
        await generate(channel, "poor")
        assert before - 60 < account.tokens.level(quotas.accounts.clock()) < before
        account.tokens.take(2000, quotas.accounts.clock())
        assert (await ask(http, "poor")).status_code == 429


async def test_requests_at_a_time_end_with_their_answers() -> None:
    async with fronts(CallerLimits(KeyLimits(concurrent_requests=2)), pause_s=0.05) as (
        http,
        channel,
        quotas,
    ):
        answers = await asyncio.gather(*(ask(http, "poor", stream=bool(i % 2)) for i in range(6)))
        assert Counter(answer.status_code for answer in answers) == {200: 2, 429: 4}
        assert quotas.accounts.of(POOR).open == 0
        running = asyncio.create_task(ask(http, "poor"))
        call = asyncio.create_task(generate(channel, "poor"))
        async with asyncio.timeout(30):
            while quotas.accounts.of(POOR).open < 2:
                await asyncio.sleep(0)
        assert (await ask(http, "poor")).status_code == 429
        running.cancel()  # the client leaves
        await asyncio.gather(running, return_exceptions=True)
        await call
        assert quotas.accounts.of(POOR).open == 0
        assert (await ask(http, "poor")).status_code == 200


async def test_priorities_are_bounded_and_passed_on() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    app = create_app(GatewayConfig(), backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        for priority, status in ((-100, 200), (7, 200), (101, 400), (1.5, 400)):
            response = await http.post("/v1/completions", json=BODY | {"priority": priority})
            assert response.status_code == status
            sglang = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}, "priority": priority}
            assert (await http.post("/generate", json=sglang)).status_code == status
            if status == 200:
                assert [r.priority for r in backend.requests[-2:]] == [priority] * 2
            else:
                assert response.json()["error"]["param"] == "priority"


# --- a full backend ------------------------------------------------------------------------------------


class Full(ScriptedBackend):
    """It has a few places, and refuses what comes when they are taken. `begun`: callers, in order."""

    def __init__(self, places: int, pause_s: float) -> None:
        super().__init__(nano_tokenizer(), pause_s=pause_s)
        self.places = places
        self.begun: list[str] = []

    async def start(self, request: GenerationRequest) -> ScriptedStream:
        if sum(not stream.closed.is_set() for stream in self.streams) >= self.places:
            raise Overloaded("full")
        self.begun.append(request.caller)
        return await super().start(request)


def request(caller: str, number: int, **more: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=8)
    return GenerationRequest(f"{caller}{number}", (5,) * 8, params, caller=caller, **more)  # type: ignore[arg-type]


async def run(backend: FairBackend, asked: GenerationRequest) -> bool:
    """Whether it was served."""
    try:
        stream = await backend.start(asked)
    except Overloaded:
        return False
    async for _ in each(stream):
        pass
    await stream.aclose()
    return True


async def beside_a_flood(backend: FairBackend) -> list[float]:
    """B's waits for six answers while A sends all that it can; -1: refused."""
    over = asyncio.Event()

    async def flood() -> None:
        while not over.is_set():
            if not await run(backend, request("a", 0)):
                await asyncio.sleep(0.002)

    floods = [asyncio.create_task(flood()) for _ in range(24)]
    await asyncio.sleep(0.05)
    waits = []
    for number in range(6):
        began = asyncio.get_running_loop().time()
        served = await run(backend, request("b", number))
        waits.append(asyncio.get_running_loop().time() - began if served else -1.0)
    over.set()
    await asyncio.gather(*floods)
    return waits


async def test_a_flood_of_one_caller_does_not_lock_out_another() -> None:
    full = Full(places=8, pause_s=0.02)
    assert -1.0 in await beside_a_flood(full)  # type: ignore[arg-type]  # without fairness
    fair = FairBackend(full)
    waits = await beside_a_flood(fair)
    assert 0 < min(waits) and max(waits) < 1.0, waits
    assert fair._open_requests == {} and not len(fair._turns)


async def test_a_caller_alone_is_refused_at_once() -> None:
    full = Full(places=2, pause_s=0.05)
    fair = FairBackend(full)
    served = await asyncio.gather(*(run(fair, request("", n)) for n in range(6)))
    assert served.count(True) == 2


async def test_places_are_given_by_weight_and_waiting_ends_in_time() -> None:
    full = Full(places=6, pause_s=0.02)
    fair = FairBackend(full, lambda caller: {"a": 2.0, "b": 1.0}.get(caller, 1.0))
    held = [await fair.start(request("c", n)) for n in range(6)]
    waiting = [asyncio.create_task(run(fair, request(caller, n))) for n in range(4) for caller in ("a", "b")]
    await asyncio.sleep(0.05)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s"):
        await fair.start(request("d", 0, timeout_s=0.1))
    gone = asyncio.create_task(run(fair, request("e", 0)))
    await asyncio.sleep(0.02)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    full.places = 1
    for stream in held:
        await stream.aclose()
    assert all(await asyncio.gather(*waiting))
    begun = full.begun[6:]
    assert Counter(begun) == {"a": 4, "b": 4}
    assert Counter(begun[:6])["a"] == 4  # two for one, until it has no more
    assert fair._open_requests == {} and not len(fair._turns)
