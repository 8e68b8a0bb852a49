"""An adapter is chosen by its name, on every route and by the SDK; a name that none has is a 404."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_client import client_of
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient, InvalidRequest, LoraAdapter, Model, NotFound
from eyas.common.config import GatewayConfig
from eyas.common.page_names import salt_of
from eyas.common.types import Adapter, AdapterRoster, PromptTokenLogprobs
from gateway.grpc.front import GrpcFront
from gateway.limits.adapters import AdapterLimits
from gateway.limits.quotas import CallerLimits, KeyLimits
from gateway.observe.adapters import AdapterMeter, AdapterMetrics
from gateway.observe.metrics import GatewayMetrics

ONE, TWO = Adapter("one", "/one", "1" * 16, 8), Adapter("org/two", "/two", "2" * 16, 4)
BASE = "eyas-nano"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/generate": {"text": "Hi"},
}


@pytest.fixture
def backend() -> ScriptedBackend:
    made = ScriptedBackend(nano_tokenizer())
    made.adapters.roster = AdapterRoster(1, (ONE, TWO))
    return made


def missing(response: httpx.Response, name: str, param: str = "model") -> None:
    assert response.status_code == 404, response.text
    error = response.json()["error"]
    told = error.get("message") if isinstance(error, dict) else error
    assert f"{name!r} does not exist: this server has '{BASE}' and 'one' and 'org/two'" in told
    if "param" in error:  # Anthropic's have none
        assert error["param"] == param


@pytest.mark.parametrize("path", ROUTES)
async def test_model_chooses_the_adapter(backend: ScriptedBackend, path: str) -> None:
    async with client_of(backend) as client:
        for name, adapter in ((BASE, ""), ("one", ONE.id), ("org/two", TWO.id), (f"{BASE}:one", ONE.id)):
            response = await client.post(path, json=ROUTES[path] | {"model": name})
            assert response.status_code == 200, response.text
            if path != "/generate":
                assert response.json()["model"] == name
            request = backend.requests[-1]
            assert (request.adapter, request.salt) == (adapter, salt_of("", adapter))
        for name in ("three", f"{BASE}:three", f"{BASE}:", "one:one"):
            missing(await client.post(path, json=ROUTES[path] | {"model": name}), name)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_lora_path_names_it_apart(backend: ScriptedBackend, path: str) -> None:
    body = ROUTES[path] | {"model": BASE}
    async with client_of(backend) as client:
        for more, adapter in (
            ({"lora_path": "one"}, ONE.id),
            ({"lora_path": None}, ""),
            ({"lora_path": ""}, ""),
        ):
            response = await client.post(path, json=body | more | {"cache_salt": "mine"})
            assert response.status_code == 200, response.text
            assert (backend.requests[-1].adapter, backend.requests[-1].salt) == (
                adapter,
                salt_of("mine", adapter),
            )
        missing(await client.post(path, json=body | {"lora_path": "three"}), "three", "lora_path")
        twice = await client.post(path, json=body | {"model": "one", "lora_path": "org/two"})
        assert twice.status_code == 400 and twice.json()["error"]["param"] == "lora_path"
        agreed = await client.post(path, json=body | {"model": "one", "lora_path": "one"})
        assert agreed.status_code == 200


async def test_each_prompt_of_generate_may_have_an_adapter_of_its_own(backend: ScriptedBackend) -> None:
    body = {"text": ["Hi", "Hi", "Hi"]}
    async with client_of(backend) as client:
        response = await client.post("/generate", json=body | {"lora_path": ["one", None, "org/two"]})
        assert response.status_code == 200, response.text
        assert [request.adapter for request in backend.requests] == [ONE.id, "", TWO.id]
        few = await client.post("/generate", json=body | {"lora_path": ["one"]})
        assert few.status_code == 400 and few.json()["error"]["param"] == "lora_path"


async def test_a_name_that_is_not_known_is_looked_for_once_more(backend: ScriptedBackend) -> None:
    """Another gateway may have loaded it just now; names that are known cost no look."""
    late = Adapter("late", "/late", "3" * 16)
    backend.adapters.coming = AdapterRoster(2, (ONE, TWO, late))
    async with client_of(backend) as client:
        for name in (BASE, "one", f"{BASE}:one"):
            await client.post("/v1/completions", json={"prompt": "Hi", "model": name})
        assert backend.adapters.looks == 0
        response = await client.post("/v1/completions", json={"prompt": "Hi", "model": "late"})
        assert response.status_code == 200 and backend.adapters.looks == 1
        tokens = await client.post("/v1/messages/count_tokens", json=CHAT | {"model": "late"})
        assert tokens.status_code == 200


async def test_the_sdk_loads_names_and_unloads(backend: ScriptedBackend) -> None:
    config = GatewayConfig(grpc_port=0)
    front = GrpcFront(config, backend, nano_tokenizer(), GatewayMetrics(CollectorRegistry()))
    await front.start()
    try:
        async with AsyncClient(f"127.0.0.1:{front.port}", model="one") as client:
            assert (await client.chat([{"role": "user", "content": "Hi"}])).text
            await client.generate("Hi", model="org/two")
            await client.generate("Hi", model=BASE)
            assert [request.adapter for request in backend.requests] == [ONE.id, TWO.id, ""]
            with pytest.raises(NotFound, match="'three' does not exist"):
                await client.generate("Hi", model="three")
            loaded = await client.load_adapter("four", "/four", pinned=True, replace=True)
            assert backend.adapters.loads == [(Adapter("four", "/four", pinned=True), True)]
            assert loaded == LoraAdapter("four", f"{1:016x}", 4)
            length = 128
            assert await client.models() == [
                Model(BASE, length),
                *(Model(name, length, BASE) for name in ("one", "org/two", "four")),
            ]
            assert await client.unload_adapter("four") == loaded
            with pytest.raises(NotFound, match="'four' is not loaded"):
                await client.unload_adapter("four")
            for name in ("", "a b", BASE, "x" * 257):
                with pytest.raises(InvalidRequest, match="lora_name"):
                    await client.load_adapter(name, "/x")
    finally:
        await front.aclose()


async def test_an_adapter_has_limits_for_all_its_callers(backend: ScriptedBackend) -> None:
    """Its requests and tokens are not those of others, nor of the model."""
    registry, now = CollectorRegistry(), [1000.0]
    limits = CallerLimits(
        adapters={"one": KeyLimits(tokens_per_minute=60), "*": KeyLimits(concurrent_requests=1)}
    )
    limited = AdapterLimits(backend, limits, AdapterMetrics(registry).count_limited, lambda: now[0])
    async with client_of(limited, tokenizer=backend.tokenizer) as client:

        async def ask(name: str, **more: Any) -> httpx.Response:
            return await client.post("/v1/completions", json={"prompt": "Hi", "model": name} | more)

        first = await ask("one", prompt="one two three " * 30)
        assert first.status_code == 200 and first.json()["usage"]["prompt_tokens"] > 60
        refused = await ask("one")
        assert refused.status_code == 429, refused.text
        assert "the adapter one has used its 60 tokens per minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert [(await ask(name)).status_code for name in (BASE, "org/two")] == [200, 200]
        now[0] += 3600
        assert (await ask("one")).status_code == 200
        both = await ask("org/two", prompt=["Hi", "Hi"])
        assert both.status_code == 400
        assert "2 prompts are more than the 1 requests at a time of the adapter org/two" in both.text
        assert (await ask("org/two")).status_code == 200  # nothing of both began
    for name in ("one", "org/two"):
        assert registry.get_sample_value("eyas_adapter_requests_limited_total", {"adapter": name}) == 1.0


async def test_prompts_of_a_call_begin_together_or_not_at_all(backend: ScriptedBackend) -> None:
    """Prompts that are refused use nothing of a rate up: who comes back in time is served."""
    now = [1000.0]
    limits = CallerLimits(adapters={"one": KeyLimits(requests_per_minute=6)})
    limited = AdapterLimits(backend, limits, lambda name: None, lambda: now[0])
    async with client_of(limited, tokenizer=backend.tokenizer) as client:

        async def ask(route: str, **more: Any) -> httpx.Response:
            return await client.post(route, json={"model": "one"} | more)

        assert (await ask("/v1/completions", prompt=["Hi"] * 4)).status_code == 200
        refused = await ask("/v1/completions", prompt=["Hi"] * 5)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "30"
        now[0] += 30
        assert (await ask("/v1/completions", prompt=["Hi"] * 5)).status_code == 200
        for route, field in (("/v1/completions", "prompt"), ("/generate", "text")):
            never = await ask(route, **{field: ["Hi"] * 7})
            assert never.status_code == 400 and "retry-after" not in never.headers
            assert "7 prompts are more than the 6 requests per minute of the adapter one" in never.text
    assert len(backend.requests) == 9


async def test_the_experts_of_an_answer_are_no_request_of_its_adapter(backend: ScriptedBackend) -> None:
    """They are asked for while the answer's own request is still open."""
    backend.prompt = PromptTokenLogprobs(experts=bytes(2))
    limits = CallerLimits(adapters={"one": KeyLimits(requests_per_minute=1, concurrent_requests=1)})
    limited = AdapterLimits(backend, limits, lambda name: None)
    async with client_of(limited, tokenizer=backend.tokenizer) as client:
        body = {"text": "Hi", "lora_path": "one", "return_routed_experts": True}
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert "routed_experts" in answer.json()["meta_info"]
        assert (await client.post("/generate", json=body)).status_code == 429


async def test_each_adapter_is_counted_up_to_a_bound(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.observe.adapters.MOST_LABELS", 1)
    registry = CollectorRegistry()
    meter = AdapterMeter(backend, AdapterMetrics(registry))
    async with client_of(meter, tokenizer=backend.tokenizer) as client:
        for name in ("one", BASE, "one", "org/two"):
            response = await client.post("/v1/completions", json={"prompt": "Hi", "model": name})
            assert response.status_code == 200
    tokens, prompt = (response.json()["usage"][f"{kind}_tokens"] for kind in ("completion", "prompt"))
    for label, count in (("one", 2.0), ("others", 1.0), ("org/two", None)):
        labels = {"adapter": label}
        assert registry.get_sample_value("eyas_adapter_requests_total", labels) == count
        made = registry.get_sample_value("eyas_adapter_generation_tokens_total", labels)
        assert made == (None if count is None else count * tokens)
        read = registry.get_sample_value("eyas_adapter_prompt_tokens_total", labels)
        assert read == (None if count is None else count * prompt)
    assert registry.get_sample_value("eyas_adapters") == 2.0
