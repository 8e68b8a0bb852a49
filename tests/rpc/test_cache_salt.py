"""`cache_salt`: every route takes it to the request's pages, and says what is wrong with a bad one."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from http_client import client_of
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client.wire import options_to_pb
from eyas.common.config import GatewayConfig
from eyas.common.page_names import salt_of
from eyas.common.params import MOST_SALT
from gateway.grpc.front import GrpcFront
from gateway.observe.metrics import GatewayMetrics
from protos import eyas_pb2

NAME = {"model": "eyas-nano"}
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": NAME | {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": NAME | ASKED,
    "/v1/responses": NAME | {"input": "Hi"},
    "/v1/messages": NAME | ASKED | {"max_tokens": 2},
    "/generate": {"text": "Hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_over_http(path: str) -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend) as client:
        for salt in ("mine", "", "s" * MOST_SALT, None):
            response = await client.post(path, json=BODIES[path] | {"cache_salt": salt})
            assert response.status_code == 200 and "x-eyas-ignored" not in response.headers
            assert backend.requests[-1].salt == salt_of(salt or "")
        for bad in ("s" * (MOST_SALT + 1), 7, ["a"], {"a": 1}):
            response = await client.post(path, json=BODIES[path] | {"cache_salt": bad})
            said = response.json()["error"]
            assert response.status_code == 400 and "cache_salt" in said["message"]
            assert path == "/v1/messages" or said["param"] == "cache_salt"


async def test_over_grpc() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    config = GatewayConfig(grpc_port=0)
    front = GrpcFront(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    await front.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            call = channel.unary_stream("/eyas.v1.Eyas/Generate")
            for salt in ("mine", "", "s" * (MOST_SALT + 1)):
                options = options_to_pb({"cache_salt": salt})
                request = eyas_pb2.GenerateRequest(text="Hi", options=options)
                answer = call(request.SerializeToString(), timeout=5)
                if len(salt) <= MOST_SALT:
                    async for _ in answer:
                        pass
                    assert backend.requests[-1].salt == salt_of(salt)
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="cache_salt has more than") as refused:
                    async for _ in answer:
                        pass
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await front.aclose()
