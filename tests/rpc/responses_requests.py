"""Requests to /v1/responses, and the events of its streams."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.chat_templates import TOOLS

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "eyas-nano", "input": "Hi"}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)
EVERYTHING = f"<think>\nIs it far?\n</think>\n\nLet me look.\n{CALLS}"


def told(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream: each is named as its type, and they are numbered without a gap."""
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
        events.append(event)
    return events
