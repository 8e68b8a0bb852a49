"""`llm`, with its own file of models."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from told import SCHEMA, Server, check_arguments, refused, tell

QUESTION = "What is the capital of France?"


def model(server: Server) -> Any:
    """The served model, as `llm` finds it in extra-openai-models.yaml."""
    folder = Path(tempfile.mkdtemp())
    entry = {"model_id": "eyas", "model_name": server.model, "api_base": server.url}
    entry |= {"supports_schema": True, "supports_tools": True, "api_key_name": "eyas"}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    (folder / "keys.json").write_text(json.dumps({"eyas": server.key}))
    os.environ["LLM_USER_PATH"] = str(folder)
    import llm

    return llm.get_model("eyas")


def chat(server: Server) -> None:
    response = model(server).prompt(QUESTION, stream=False, max_tokens=40, key=server.key)
    assert response.text() and response.usage().output


def stream(server: Server) -> None:
    assert "".join(model(server).prompt(QUESTION, max_tokens=40, key=server.key))


def structured_output(server: Server) -> None:
    asked = {"schema": SCHEMA, "stream": False, "max_tokens": 300, "key": server.key}
    check_arguments(model(server).prompt(QUESTION, **asked).text())


def tools_auto(server: Server) -> None:
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"It rains in {city}."

    asked = model(server).chain(QUESTION, tools=[weather], options={"max_tokens": 40}, key=server.key)
    assert asked.text()


def error_401(server: Server) -> None:
    refused(lambda: model(server).prompt(QUESTION, key="wrong").text(), Exception)


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "structured output": structured_output,
            "tools auto": tools_auto,
            "401": error_401,
        }
    )
