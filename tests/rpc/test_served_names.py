"""A model with several names: all are listed and taken, and an answer repeats the one that was used."""

from __future__ import annotations

import pytest
from http_client import CHAT, TEXT, client_of, events
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.errors import ModelNotFound
from gateway.backends.admission import ServedModel, called

CONFIG = GatewayConfig(served_model="one", other_names=("org/two", "three"))
ITEMS = {"model": "one", "input": "Hi"}
ASKED = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", TEXT),
    ("/v1/responses", ITEMS),
    ("/v1/messages", CHAT | {"max_tokens": 9}),
]


@pytest.mark.parametrize("name", CONFIG.names)
@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_an_answer_has_the_name_that_was_used(path: str, body: dict[str, object], name: str) -> None:
    async with client_of(ScriptedBackend(nano_tokenizer()), CONFIG) as client:
        whole = await client.post(path, json=body | {"model": name})
        assert (whole.status_code, whole.json()["model"]) == (200, name)
        stream = await client.post(path, json=body | {"model": name, "stream": True})
        assert stream.text.count(f'"model":"{name}"') >= 1
        if path in ("/v1/chat/completions", "/v1/completions"):
            assert {event["model"] for event in events(stream)} == {name}


async def test_all_names_are_listed_and_no_other_is_taken() -> None:
    async with client_of(ScriptedBackend(nano_tokenizer()), CONFIG) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == list(CONFIG.names)
        for name in CONFIG.names:
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
        for path, body in ASKED:
            refused = await client.post(path, json=body | {"model": "eyas-nano"})
            assert refused.status_code == 404
            assert "this server has 'one' and 'org/two' and 'three'" in refused.text


def test_a_model_is_called_by_one_of_its_names() -> None:
    model = ServedModel("one", 128, 4096, "f")
    assert called(model, CONFIG, "one") is model
    assert called(model, CONFIG, "three") == ServedModel("three", 128, 4096, "f")
    with pytest.raises(ModelNotFound):
        called(model, CONFIG, "four")
