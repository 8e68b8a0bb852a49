"""What a client's script tells: a line of JSON per feature, with an empty text or what went wrong.

Scripts of this folder run in an environment of their own, with one client installed and nothing of Eyas:
`python SCRIPT URL KEY POOR_KEY MODEL FOLDER`. They import this file by its bare name.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Lima", "Oslo"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": WEATHER}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Lima", "sunny": true\}\}\n</tool_call>'
"""A regular expression that forces a call where the model may do as it likes."""

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class Server:
    """`poor`: a key that may ask once per minute. `folder`: the model's."""

    url: str
    key: str
    poor: str
    model: str
    folder: str


def check_arguments(text: str) -> None:
    """The arguments of a call, or an answer, must follow SCHEMA."""
    value = json.loads(text)
    assert value["city"] in ("Lima", "Oslo") and isinstance(value["sunny"], bool), value


def tell(features: dict[str, Callable[[Server], None]]) -> None:
    """Tries each feature with the server that the command line names."""
    server = Server(*sys.argv[1:])
    for name, feature in features.items():
        wrong = ""
        try:
            feature(server)
        except Exception as error:
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"feature": name, "wrong": wrong}), flush=True)


def refused(ask: Callable[[], object], kind: type[Exception]) -> Any:
    """The error of this kind that `ask` raises."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"there was no {kind.__name__}")
