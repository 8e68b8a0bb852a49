"""Every answer says which weights gave it, once they have changed: whole ones, and streams at their end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_client import client_of
from scripted_backend import ScriptedBackend, ScriptedStream
from tool_models import speaker

from eyas.common.config import GatewayConfig

MODEL = "eyas-nano"
SAID = {"weight_version": "step-7"}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "metadata": {"team": "a"}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100},
}
OWN = {"/v1/responses": {"team": "a"}}
"""What a caller has put where answers say it."""


@pytest.fixture(params=["default", SAID["weight_version"]])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ScriptedStream, "weight_version", request.param)
    return str(request.param)


async def answered(path: str, **changes: Any) -> str:
    backend: ScriptedBackend = speaker("hermes", "Good day.")
    async with client_of(backend, GatewayConfig()) as client:
        response = await client.post(path, json={"model": MODEL, **BODIES[path], **changes})
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_names_its_weights(path: str, version: str) -> None:
    told = json.loads(await answered(path))
    expected = OWN.get(path, {}) | ({} if version == "default" else SAID)
    assert told.get("metadata", {}) == expected


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_names_its_weights_at_its_end(path: str, version: str) -> None:
    lines = (await answered(path, stream=True)).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = [event.get("response", event).get("metadata", {}) for event in events]
    own = OWN.get(path, {})
    named = [place for place, each in enumerate(said) if each != own and each]
    if version == "default":
        assert not named
        return
    assert [said[place] for place in named] == [own | SAID]
    last = len(events) - (2 if path == "/v1/messages" else 1)  # message_stop says nothing
    assert named == [last]
