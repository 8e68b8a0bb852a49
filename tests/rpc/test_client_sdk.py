"""The SDK, blocking and asyncio, against the gRPC front over a scripted backend."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import grpc
import pytest
from scripted_backend import EOS, ScriptedBackend, ScriptedStream

import eyas.client
from eyas.client import (
    AsyncClient,
    Client,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthorized,
    Unavailable,
)
from eyas.common.errors import PayloadTooLarge
from eyas.common.types import GenerationRequest, RequestDraftLimits
from eyas.common.wire import rpc
from tests.rpc.sdk_front import CHAT, CONFIG, backend, client, in_thread, served

__all__ = ["backend", "client"]  # a fixture


async def test_chat(client: AsyncClient, backend: ScriptedBackend) -> None:
    reply = await client.chat(CHAT, max_tokens=50, seed=7, temperature=0.5, logit_bias={3: 1.0})
    assert reply.text == "Hello, world!"
    (choice,) = reply.choices
    assert choice.finish_reason == "stop" and choice.tokens[-1] == EOS
    assert reply.usage.completion_tokens == len(choice.tokens)
    assert reply.usage.prompt_tokens == len(backend.requests[0].prompt_ids)
    assert reply.usage.verify_steps > 0 and reply.usage.accepted_prediction_tokens > 0
    params = backend.requests[0].params
    assert (params.max_tokens, params.seed, params.temperature) == (50, 7, 0.5)
    assert params.logit_bias == {3: 1.0}


async def test_chat_stream(client: AsyncClient, backend: ScriptedBackend) -> None:
    async with client.chat_stream(CHAT) as stream:
        deltas = [delta async for delta in stream]
    assert len(deltas) > 2
    assert "".join(delta.text for delta in deltas) == "Hello, world!"
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert stream.usage.completion_tokens == sum(len(delta.tokens) for delta in deltas)
    assert backend.streams[0].closed.is_set()


async def test_generate_from_text_and_from_ids(client: AsyncClient, backend: ScriptedBackend) -> None:
    ids = backend.tokenizer.encode("The sun")
    first = await client.generate("The sun", n=2, logprobs=2, speculative=False)
    second = await client.generate(list(ids), max_tokens=2)
    assert [request.prompt_ids for request in backend.requests] == [ids, ids]
    assert [choice.text for choice in first.choices] == ["Hello, world!"] * 2
    assert len(first.choices[1].logprobs) == len(first.choices[1].tokens)
    assert first.choices[0].logprobs[0].top[1] == (7, -1.5)
    assert not backend.requests[0].speculative and backend.requests[1].speculative
    assert second.choices[0].finish_reason == "length" and second.usage.completion_tokens == 2


async def test_a_request_limits_its_own_drafts(client: AsyncClient, backend: ScriptedBackend) -> None:
    await client.generate("The sun", draft_limits={"steps": 3, "topk": 1})
    await client.chat(CHAT, draft_limits={"draft_tokens": 4})
    await client.chat(CHAT)
    limits = [request.draft_limits for request in backend.requests]
    assert limits == [RequestDraftLimits(3, 1), RequestDraftLimits(0, 0, 4), RequestDraftLimits()]
    for wrong in ({"steps": 0}, {"topk": -1}, {"draft_tokens": 1}):
        with pytest.raises(InvalidRequest, match=rf"draft_limits.{next(iter(wrong))} must be at least"):
            await client.chat(CHAT, draft_limits=wrong)
    with pytest.raises(InvalidRequest, match="draft_limits"):
        await client.chat(CHAT, draft_limits={"depth": 3})


async def test_what_a_worker_refuses_has_this_apis_names(
    client: AsyncClient, backend: ScriptedBackend
) -> None:
    backend.refusal = InvalidRequest("speculative.steps is 9, and ...", param="speculative.steps")
    with pytest.raises(InvalidRequest, match=r"draft_limits.steps is 9") as refused:
        await client.generate("x", draft_limits={"steps": 9})
    assert refused.value.param == "draft_limits.steps"


async def test_stop_strings(client: AsyncClient, backend: ScriptedBackend) -> None:
    reply = await client.chat(CHAT, stop=["wor"])
    assert reply.text == "Hello, " and reply.choices[0].finish_reason == "stop"
    assert backend.streams[0].cancelled == [None]


async def test_models(client: AsyncClient) -> None:
    (model,) = await client.models()
    assert (model.id, model.context_length) == ("eyas-nano", 128)


async def test_leaving_a_stream_cancels_the_call(client: AsyncClient, backend: ScriptedBackend) -> None:
    backend.says = lambda request, choice: "on and on " * 30
    backend.pause_s = 0.05
    async with client.generate_stream("x") as stream:
        await anext(stream)
    await asyncio.wait_for(backend.streams[0].closed.wait(), 30)
    assert [delta async for delta in stream] == []


BAD_CALLS = [
    (InvalidRequest, "temperature", {"temperature": 3.0}),
    (InvalidRequest, "n", {"n": 0}),
    (InvalidRequest, "stop", {"stop": [""]}),
    (InvalidRequest, "top_p", {"top_p": float("nan")}),
    (InvalidRequest, "max_tokens", {"max_tokens": "many"}),
    (InvalidRequest, "colour", {"colour": "red"}),
    (ContextLengthExceeded, "max_tokens", {"max_tokens": 1000}),
]


@pytest.mark.parametrize(("error", "field", "options"), BAD_CALLS)
async def test_bad_options_are_named(
    client: AsyncClient, backend: ScriptedBackend, error: type, field: str, options: dict
) -> None:
    with pytest.raises(error) as caught:
        await client.chat(CHAT, **options)
    assert caught.value.param == field and field in str(caught.value)
    assert type(caught.value) is error
    assert not backend.streams


async def test_bad_prompts_are_named(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content is required"):
        await client.chat([*CHAT, {"role": "user"}])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role must be one of .*, not None"):
        await client.chat([{"content": "Hi"}])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role"):
        await client.chat([{"role": "robot", "content": "Hi"}])
    with pytest.raises(InvalidRequest, match="messages"):
        await client.chat([])
    with pytest.raises(InvalidRequest, match="prompt"):
        await client.generate([5000])
    with pytest.raises(InvalidRequest, match="prompt"):
        await client.generate("")
    with pytest.raises(PayloadTooLarge, match="5005 vs. 4096"):
        await client.generate("x" * 5000)


async def test_refusals_and_failures_have_their_types(client: AsyncClient, backend: ScriptedBackend) -> None:
    backend.refusal = Overloaded("the queue is full")
    with pytest.raises(Overloaded, match="queue is full"):
        await client.chat(CHAT)
    backend.refusal = None
    backend.breaks_with = Unavailable("no decode worker is left")
    with pytest.raises(Unavailable, match="no decode worker"):
        await client.chat(CHAT)
    assert backend.streams[0].closed.is_set()


async def test_a_call_is_made_anew_only_before_its_first_token(backend: ScriptedBackend) -> None:
    refusals: list[Exception] = [Unavailable("starting"), Overloaded("the queue is full")]
    start = backend.start

    async def refusing(request: GenerationRequest) -> ScriptedStream:
        if refusals:
            raise refusals.pop()
        return await start(request)

    backend.start = refusing  # type: ignore[method-assign]
    async with served(backend) as address, AsyncClient(address) as client:
        assert (await client.chat(CHAT)).text == "Hello, world!"
        assert len(backend.streams) == 1 and not refusals
        refusals += [Overloaded("the queue is full")]
        with pytest.raises(Overloaded):
            await client.chat(CHAT, timeout_s=0.5)  # no time for another one
        refusals += [InvalidRequest("never")]
        with pytest.raises(InvalidRequest):
            await client.chat(CHAT)
        backend.breaks_with = Unavailable("no decode worker is left")
        with pytest.raises(Unavailable, match="no decode worker"):
            await client.chat(CHAT)
        assert len(backend.streams) == 2


async def test_a_client_waits_as_long_as_the_server_says(backend: ScriptedBackend) -> None:
    backend.refusal = Overloaded("the queue is full", 60)
    async with served(backend) as address, AsyncClient(address) as client:
        with pytest.raises(Overloaded) as refused:
            await client.chat(CHAT, timeout_s=30)  # no time for another one
        assert refused.value.retry_after_s == 60 and len(backend.requests) == 1


async def test_leaving_a_stream_ends_its_retries(backend: ScriptedBackend) -> None:
    backend.refusal = Unavailable("starting")
    async with served(backend) as address, AsyncClient(address) as client:
        async with client.chat_stream(CHAT) as stream:
            reading = asyncio.ensure_future(anext(stream, None))
            async with asyncio.timeout(20):
                while not backend.requests:
                    await asyncio.sleep(0.01)
        assert await asyncio.wait_for(reading, 20) is None
        assert len(backend.requests) == 1


async def test_a_stream_that_is_left_ends_for_its_reader(backend: ScriptedBackend) -> None:
    backend.pause_s = 30.0
    async with served(backend) as address, AsyncClient(address) as client:
        async with client.chat_stream(CHAT) as stream:
            await anext(stream)
            reading = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0.1)
        assert await asyncio.wait_for(reading, 30) is None


async def test_unknown_model_timeout_and_no_server(backend: ScriptedBackend) -> None:
    backend.pause_s = 5.0
    async with served(backend) as address:
        async with AsyncClient(address, model="gpt-9") as client:
            with pytest.raises(NotFound, match="gpt-9"):
                await client.chat(CHAT)
        async with AsyncClient(address) as client:
            with pytest.raises(DeadlineExceeded):
                await client.chat(CHAT, timeout_s=0.3)
            await asyncio.wait_for(backend.streams[0].closed.wait(), 30)
    async with AsyncClient(address) as client:
        with pytest.raises(Unavailable):
            await client.models(timeout_s=2)


async def test_api_key(backend: ScriptedBackend) -> None:
    async with served(backend, dataclasses.replace(CONFIG, api_keys=("secret",))) as address:
        for key in (None, "wrong"):
            async with AsyncClient(address, api_key=key) as client:
                with pytest.raises(Unauthorized):
                    await client.models()
                with pytest.raises(Unauthorized):
                    await client.chat(CHAT)
        async with AsyncClient(address, api_key="secret") as client:
            assert (await client.chat(CHAT)).text == "Hello, world!"
    assert len(backend.requests) == 1


async def test_health_follows_the_backend(backend: ScriptedBackend) -> None:
    backend.is_healthy = False
    async with served(backend) as address, rpc.channel(address) as channel:
        assert not await rpc.is_serving(channel)
        backend.is_healthy = True
        async with asyncio.timeout(20):
            while not await rpc.is_serving(channel):
                await asyncio.sleep(0.05)


# --- the blocking twin, in a thread as ordinary code would be -------------------------------------------


async def test_blocking_calls(backend: ScriptedBackend) -> None:
    def work(client: Client) -> None:
        assert client.chat(CHAT).text == "Hello, world!"
        assert client.generate("x", stop=["wor"]).text == "Hello, "
        assert client.models()[0].id == "eyas-nano"
        with pytest.raises(InvalidRequest, match="temperature"):
            client.chat(CHAT, temperature=-1.0)

    before = threading.active_count()
    await in_thread(backend, work)
    assert not [thread for thread in threading.enumerate() if thread.name == "eyas-client"], before


async def test_blocking_streams(backend: ScriptedBackend) -> None:
    backend.pause_s = 0.02

    def work(client: Client) -> None:
        with client.chat_stream(CHAT) as stream:
            assert "".join(delta.text for delta in stream) == "Hello, world!"
            assert stream.usage.completion_tokens > 0 and next(stream, None) is None
        with client.generate_stream("x") as stream:
            next(stream)

    await in_thread(backend, work)
    async with asyncio.timeout(20):
        await backend.streams[1].closed.wait()


async def test_the_plain_stub_works_too(backend: ScriptedBackend) -> None:
    """What a caller in another language does: generated code and nothing of the SDK."""
    from protos import eyas_pb2, eyas_pb2_grpc

    async with served(backend) as address, grpc.aio.insecure_channel(address) as channel:
        stub = eyas_pb2_grpc.EyasStub(channel)
        events = [event async for event in stub.Generate(eyas_pb2.GenerateRequest(text="x"), timeout=5)]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["started", *["delta"] * (len(events) - 2), "finished"] and len(events) > 3
        reasons = [event.delta.finish_reason for event in events[1:-1]]
        assert reasons[-1] == eyas_pb2.FINISH_REASON_STOP and set(reasons[:-1]) == {0}
        for role in (eyas_pb2.CHAT_ROLE_UNSPECIFIED, 9):
            robot = eyas_pb2.ChatMessage(role=role, content="Hi")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Chat(eyas_pb2.ChatRequest(messages=[robot]), timeout=5).read()
            trailer = dict(refused.value.trailing_metadata())
            assert (trailer["eyas-code"], trailer["eyas-param"]) == ("invalid_request", "messages[0].role")
        assert "".join(event.delta.text for event in events) == "Hello, world!"


def test_public_names() -> None:
    for name in eyas.client.__all__:
        assert hasattr(eyas.client, name)
    assert sorted(eyas.client.__all__) == eyas.client.__all__
