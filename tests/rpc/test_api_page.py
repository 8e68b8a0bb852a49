"""docs/api.md lists every route and field of /openapi.json. Run as a program, this file writes the page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from http_client import client_of
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common import errors
from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError, EyasError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
RANGES = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "≥ {} items",
    "maxItems": "≤ {} items",
    "maxProperties": "≤ {} keys",
    "maxLength": "≤ {} characters",
    "except": "not {}",
}
INTRODUCTION = """\
# The HTTP API

Every route and every field, from the server's own `/openapi.json`, which it shows under `/docs`.
`tests/rpc/test_api_page.py` writes this page and checks that it is fresh.

* Types are strict: a string where a number belongs is a 400 that names the field. `null` means absent.
* Fields that are not listed are ignored and named in the header `x-eyas-ignored`.
* Fields under *refused* are known but not supported. Values that ask for nothing are accepted; any other is a
  400 with the reason, because ignoring the field would change the answer.
* Errors have OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`; `param` is the field, as
  `messages[0].content`. A stream that fails after it began ends with an event that has such an object
  (`/v1/responses`: with `response.failed`).

Every answer has these headers:

| header | |
|---|---|
| `x-request-id` | the caller's: 1 to 128 printable ASCII characters, no spaces; else a new one |
| `request-id` | the same, of `/v1/messages`: where Anthropic's clients look |
| `x-eyas-ignored` | fields of the body that nothing reads, at most 32 and then `...`; absent if none are |
| `retry-after` | with status 429: seconds |
| `x-ratelimit-*` | what a limited key may have, still has, and when it is back ([limits](limits.md)) |
| `traceparent` | the server's own span, where it traces calls ([tracing](tracing.md)) |
| `www-authenticate` | with status 401: `Bearer` |
"""


def the_api() -> dict[str, Any]:
    async def ask() -> Any:
        async with client_of(ScriptedBackend(nano_tokenizer()), GatewayConfig(api_keys=("k",))) as client:
            return (await client.get("/openapi.json")).json()

    found: dict[str, Any] = asyncio.run(ask())
    return found


def page(api: dict[str, Any]) -> str:
    return "\n".join([INTRODUCTION, *_errors(), *_routes(api), *_bodies(api)])


def _errors() -> Iterator[str]:
    """A row per error that a caller may see. ConfigError is for who starts a server."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EyasError)]
    told = {
        kind: str(kind.__doc__).replace("retry_after_s", "retry-after")
        for kind in kinds
        if kind is not ConfigError
    }
    told[EyasError] = "A defect of the server."
    yield "| status | `code` | |\n|---|---|---|"
    for kind in sorted(told, key=lambda kind: (kind.http_status, kind.code)):
        yield f"| {kind.http_status} | `{kind.code}` | {told[kind]} |"
    yield ""


def _routes(api: dict[str, Any]) -> Iterator[str]:
    yield "## Routes\n"
    yield "| route | key | |\n|---|---|---|"
    for path, verbs in api["paths"].items():
        for verb, operation in verbs.items():
            key = "yes" if "security" in operation else "no"
            yield f"| `{verb.upper()} {path}` | {key} | {operation['summary']} |"
    yield ""


def _bodies(api: dict[str, Any]) -> Iterator[str]:
    schemas, told = api["components"]["schemas"], set[str]()
    for path, verbs in api["paths"].items():
        for verb, operation in verbs.items():
            if "requestBody" in operation:
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                yield f"## {verb.upper()} {path}\n"
                yield from _body(schemas[_name(ref)])
                yield from _inner(schemas, _name(ref), told)


def _inner(schemas: dict[str, Any], outer: str, told: set[str]) -> Iterator[str]:
    """The objects that a body holds, each told once."""
    for name in _names(schemas[outer]):
        if name not in told:
            told.add(name)
            yield f"### {name}\n"
            yield from _body(schemas[name])
            yield from _inner(schemas, name, told)


def _body(schema: dict[str, Any]) -> Iterator[str]:
    fields = schema["properties"]
    refused = {name: field for name, field in fields.items() if _is_refused(field)}
    yield "| field | type | default | range | |\n|---|---|---|---|---|"
    for name, field in fields.items():
        if name not in refused:
            default = "required" if name in schema.get("required", ()) else _default(field)
            words = field.get("description", "").replace("\n", " ")
            yield f"| `{name}` | {_type(field)} | {default} | {_range(field)} | {words} |"
    yield ""
    if refused:
        yield "| refused | accepted, beside null | why |\n|---|---|---|"
        for name, field in refused.items():
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in field["enum"][1:])
            why = field["description"].removeprefix("Not supported: ").rstrip(".")
            yield f"| `{name}` | {neutral} | {why} |"
        yield ""


def _is_refused(field: dict[str, Any]) -> bool:
    return bool(field.get("description", "").startswith("Not supported: "))


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return "" if default is None or isinstance(default, dict) else f"`{json.dumps(default)}`"


def _kinds(field: dict[str, Any]) -> list[dict[str, Any]]:
    return [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]


def _type(field: dict[str, Any]) -> str:
    return " or ".join(_one_type(kind) for kind in _kinds(field))


def _one_type(kind: dict[str, Any]) -> str:
    if "$ref" in kind:
        name = _name(kind["$ref"])
        return f"[{name}](#{name.lower()})"
    if "const" in kind or "enum" in kind:
        return ", ".join(f"`{json.dumps(value)}`" for value in kind.get("enum", [kind.get("const")]))
    if kind["type"] == "array":
        return f"list of {_type(kind['items'])}"
    return str(kind["type"])


def _range(field: dict[str, Any]) -> str:
    merged = field | {key: value for kind in _kinds(field) for key, value in kind.items()}
    merged["except"] = merged.get("not", {}).get("const")
    return ", ".join(
        words.format(merged[key]) for key, words in RANGES.items() if merged.get(key) is not None
    )


def _names(schema: dict[str, Any]) -> list[str]:
    texts = json.dumps(schema).split("#/components/schemas/")[1:]
    return list(dict.fromkeys(text.partition('"')[0] for text in texts))


def _name(ref: str) -> str:
    return ref.rpartition("/")[2]


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(the_api()), f"run: python {Path(__file__).name}"


if __name__ == "__main__":
    PAGE.write_text(page(the_api()), encoding="utf-8")
