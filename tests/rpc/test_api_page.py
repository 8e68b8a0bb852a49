"""docs/api.md lists every route and field of /openapi.json. Run as a program, this file writes the page."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_client import client_of
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common import errors
from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError, EyasError
from tests.doc_index import anchor

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
PART_OF_BODY = {"SamplingBody": "POST /generate (sampling_params)"}
TITLES = {  # of fields that several bodies share, by one of them
    "json_schema": "Sampling and structure",
    "no_stop_trim": "Options of chats, responses and completions",
    "response_format": "Options of chats and completions",
    "speculative": "Options of every answer",
    "tools": "Tools and templates",
    "messages": "Anthropic's chats",
    "weight_version": "Updates of weights",
}
INTRODUCTION = """\
# The HTTP API

Every route and every field, from the server's own `/openapi.json`, which it shows under `/docs`.
`tests/rpc/test_api_page.py` writes this page and checks that it is fresh. Fields that several
routes share stand once, in the sections before the routes' own.

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
    """A section per group of fields that several routes share, then one per body with its own."""
    schemas, listed = api["components"]["schemas"], set[str]()
    routes = _routes_by_body(api)
    bodies = {name: schemas[name]["properties"] for name in [*routes, *PART_OF_BODY]}
    shared = _shared_fields(bodies, {name: set(schemas[name].get("required", ())) for name in bodies})
    for group in shared:
        yield f"## {group.title}\n"
        names = [name for body in group.bodies for name in routes.get(body, [PART_OF_BODY.get(body, "")])]
        yield f"Fields of {', '.join(f'`{name}`' for name in names)}.\n"
        yield from _tables(group.fields, group.required)
        yield from _inner(schemas, group.fields, listed)
    for body, names in routes.items():
        yield f"## {', '.join(names)}\n"
        yield from _body(schemas, body, shared)
        yield from _inner(schemas, schemas[body], listed, shared)


def _routes_by_body(api: dict[str, Any]) -> dict[str, list[str]]:
    """The routes of each body, in the order of the routes."""
    routes: dict[str, list[str]] = {}
    for path, verbs in api["paths"].items():
        for verb, operation in verbs.items():
            if "requestBody" in operation:
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                routes.setdefault(_name(ref), []).append(f"{verb.upper()} {path}")
    return routes


@dataclass
class SharedFields:
    """Fields that several bodies have in the same words."""

    bodies: tuple[str, ...]
    required: set[str]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return next(TITLES[name] for name in self.fields if name in TITLES)


def _shared_fields(bodies: dict[str, dict[str, Any]], required: dict[str, set[str]]) -> list[SharedFields]:
    """Groups of four or more fields that the same bodies have. A field that more bodies have joins the group
    with the most of them.
    """
    owners = {
        (body, name): tuple(
            other
            for other in bodies
            if bodies[other].get(name) == its and (name in required[other]) == (name in required[body])
        )
        for body, fields in bodies.items()
        for name, its in fields.items()
    }
    sizes = Counter(set_of for (body, _), set_of in owners.items() if body == set_of[0])
    groups = {
        set_of: SharedFields(set_of, required[set_of[0]])
        for set_of, size in sizes.items()
        if len(set_of) > 1 and size >= 4
    }
    for (body, name), set_of in owners.items():
        fitting = [group for group in groups.values() if set(group.bodies) <= set(set_of)]
        if body == set_of[0] and fitting:
            max(fitting, key=lambda group: len(group.bodies)).fields[name] = bodies[body][name]
    return list(groups.values())


def _inner(
    schemas: dict[str, Any], outer: Any, listed: set[str], shared: Sequence[SharedFields] = ()
) -> Iterator[str]:
    """The objects that a body holds, each listed once on the page."""
    for name in _names(outer):
        if name not in listed:
            listed.add(name)
            yield f"### {name}\n"
            yield from _body(schemas, name, shared)
            yield from _inner(schemas, schemas[name], listed, shared)


def _body(schemas: dict[str, Any], name: str, shared: Sequence[SharedFields]) -> Iterator[str]:
    """The fields of a body, after links to those that it shares."""
    groups = [group for group in shared if name in group.bodies]
    elsewhere = {one for group in groups for one in group.fields}
    fields = {one: its for one, its in schemas[name]["properties"].items() if one not in elsewhere}
    if groups:
        links = ", ".join(f"[{group.title}](#{anchor(group.title)})" for group in groups)
        yield f"Fields: those of {links}{', and' if fields else '.'}\n"
    yield from _tables(fields, set(schemas[name].get("required", ())))
    if not schemas[name]["properties"]:
        yield "The body is empty.\n"


def _tables(fields: dict[str, Any], required: set[str]) -> Iterator[str]:
    refused = {name: its for name, its in fields.items() if _is_refused(its)}
    taken = {name: its for name, its in fields.items() if name not in refused}
    if taken:
        yield "| field | type | default | range | |\n|---|---|---|---|---|"
    for name, its in taken.items():
        default = "required" if name in required else _default(its)
        words = its.get("description", "").replace("\n", " ")
        yield f"| `{name}` | {_type(its)} | {default} | {_range(its)} | {words} |"
    if taken:
        yield ""
    if refused:
        yield "| refused | accepted, beside null | why |\n|---|---|---|"
        for name, its in refused.items():
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in its["enum"][1:])
            why = its["description"].removeprefix("Not supported: ").rstrip(".")
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


def _names(schema: Any) -> list[str]:
    texts = json.dumps(schema).split("#/components/schemas/")[1:]
    return list(dict.fromkeys(text.partition('"')[0] for text in texts))


def _name(ref: str) -> str:
    return ref.rpartition("/")[2]


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(the_api()), f"run: python {Path(__file__).name}"


if __name__ == "__main__":
    PAGE.write_text(page(the_api()), encoding="utf-8")
