"""What a model's folder changes in answers: marked spaces, sampling defaults, a template that fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers

from eyas.client import AsyncClient
from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError
from gateway.grpc.front import GrpcFront
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.text.sampling_defaults import sampling_defaults
from gateway.text.templates import ChatTemplate
from gateway.text.tokenizer import Tokenizer

CONFIG = GatewayConfig(grpc_port=0)
CHAT = {"model": "eyas-nano", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "eyas-nano", "prompt": "a b"}


def marked_spaces() -> Tokenizer:
    """A SentencePiece-like tokenizer: "▁" marks a space, and every text begins with one."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "▁a", "▁b", "▁c"]
    merges = [("▁", letter) for letter in "abc"]
    hf = HFTokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    hf.add_special_tokens(pieces[:3])
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(hf, ChatTemplate("{{ messages[0].content }}", {}))


def client_of(backend: ScriptedBackend, config: GatewayConfig = CONFIG) -> httpx.AsyncClient:
    app = create_app(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=10)


@pytest.fixture
def spaced() -> ScriptedBackend:
    """Answers " c a", which is how "b" and the like go on."""
    return ScriptedBackend(marked_spaces(), says=lambda request, choice: "c a")


async def streamed_text(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    response = await client.post(path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line][:-1]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def test_a_completion_keeps_its_first_space(spaced: ScriptedBackend) -> None:
    async with client_of(spaced) as client:
        for echo, expected in ((False, " c a"), (True, "a b c a")):
            body = TEXT | {"echo": echo}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == expected
            assert await streamed_text(client, "/v1/completions", body) == expected
        answer = (await client.post("/v1/completions", json=TEXT | {"prompt": [7, 8], "echo": True})).json()
        assert answer["choices"][0]["text"] == "a b c a"
        answer = (await client.post("/v1/completions", json=TEXT | {"logprobs": 0})).json()
        assert answer["choices"][0]["logprobs"]["tokens"][:2] == [" c", " a"]
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 2, 4]
        answer = (await client.post("/generate", json={"text": "a b"})).json()
        assert answer["text"] == " c a"


async def test_a_chat_answer_has_no_first_space(spaced: ScriptedBackend) -> None:
    async with client_of(spaced) as client:
        answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["choices"][0]["message"]["content"] == "c a"
        assert await streamed_text(client, "/v1/chat/completions", CHAT) == "c a"


async def test_grpc_tells_completions_from_chats_too(spaced: ScriptedBackend) -> None:
    front = GrpcFront(CONFIG, spaced, spaced.tokenizer, GatewayMetrics(CollectorRegistry()))
    await front.start()
    try:
        async with AsyncClient(f"127.0.0.1:{front.port}") as client:
            assert (await client.generate("a b")).text == " c a"
            assert (await client.chat([{"role": "user", "content": "a"}])).text == "c a"
    finally:
        await front.aclose()


SAID = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.fixture
async def requests(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedBackend]]:
    file = SAID | {"max_new_tokens": 9, "do_sample": False, "max_length": 3, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend, GatewayConfig(sampling=sampling_defaults(tmp_path))) as client:
        yield client, backend


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", TEXT),
        ("/generate", {"text": "a"}),
    ],
)
async def test_fields_that_a_request_lacks_get_the_models_defaults(
    path: str, body: dict[str, Any], requests: tuple[httpx.AsyncClient, ScriptedBackend]
) -> None:
    client, backend = requests
    said = {"temperature": 0.0, "top_k": 3, "repetition_penalty": 1.0}
    for more, length in (({}, 9), (said, 4)):
        if path == "/generate":
            given: dict[str, Any] = {"sampling_params": more | ({"max_new_tokens": 4} if more else {})}
        else:
            given = more | ({"max_tokens": 4} if more else {})
        assert (await client.post(path, json=body | given)).status_code == 200
        params = backend.requests[-1].params
        assert {name: getattr(params, name) for name in SAID} == SAID | more
        assert params.max_tokens == length


async def test_the_models_defaults_are_shown(requests: tuple[httpx.AsyncClient, ScriptedBackend]) -> None:
    info = (await requests[0].get("/get_model_info")).json()
    assert info["preferred_sampling_params"] == SAID | {"max_new_tokens": 9}
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        assert (await client.get("/get_model_info")).json()["preferred_sampling_params"] is None


def test_the_files_values_are_checked(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_k": -1, "temperature": 1, "top_p": null, "num_beams": 4}')
    assert sampling_defaults(tmp_path) == {"top_k": 0, "temperature": 1}
    for said in ('{"temperature": -1}', '{"top_k": 1.5}', '{"top_p": true}', '{"max_new_tokens": -1}'):
        file.write_text(said)
        field = said.partition('":')[0].removeprefix('{"')
        with pytest.raises(ConfigError, match=rf"generation_config\.json.*{field}"):
            sampling_defaults(tmp_path)


async def test_a_template_that_fails_is_a_400(spaced: ScriptedBackend) -> None:
    spaced.tokenizer = Tokenizer(spaced.tokenizer._hf, ChatTemplate("{{ messages[0].content / 2 }}", {}))
    async with client_of(spaced) as client:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await client.post(path, json=CHAT)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "messages" and "TypeError: unsupported operand" in error["message"]
