"""Attacks that are well-formed: JSON, grammars, chats, tools and prompts that cost more than they look.

Every answer comes whole. A status is noted, and of a 400 nothing more: what it says is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tests.e2e.attacks.attack import SILENCE, Attack, Tally, Target, attack

MOST = (2 << 20) - 1024  # bytes of a body, nearly
WAIT_S = 120.0
CHAT: dict[str, Any] = {
    "model": "eyas-nano",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 8,
}
TEXT: dict[str, Any] = {"model": "eyas-nano", "prompt": "Hi", "max_tokens": 8}


async def post(target: Target, tally: Tally, path: str, bodies: Sequence[bytes], at_once: int = 4) -> None:
    """Posts each body, a few at a time, and notes the answers."""
    places, headers = asyncio.Semaphore(at_once), {"authorization": target.authorization}
    async with httpx.AsyncClient(base_url=target.url, timeout=WAIT_S, trust_env=False) as client:

        async def one(body: bytes) -> None:
            async with places:
                began = time.monotonic()
                try:
                    answer = str((await client.post(path, content=body, headers=headers)).status_code)
                except httpx.TimeoutException:
                    answer = SILENCE
                except httpx.TransportError:
                    answer = "closed"
                tally.note(answer, began)

        await asyncio.gather(*(one(body) for body in bodies))


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def filled(text: str, size: int = MOST) -> str:
    """`text`, again and again, `size` bytes of it."""
    return text * (size // len(text.encode()))


# --- JSON --------------------------------------------------------------------------------------------------


async def hostile_json(target: Target, tally: Tally) -> None:
    start = b'{"model": "eyas-nano", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "x": '
    values = [
        b"[" * 1_000_000,
        b'{"a":' * 300_000,
        b"[" * 150 + b"]" * 150,
        b"9" * 1_000_000,
        b"1e999999999",
        b"-" + b"9" * 4000,
        b"0." + b"3" * 1_000_000,
        b"NaN",
        b"-Infinity",
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\xff\xfe"',
        b'"\xed\xa0\x80"',
        b'"\x00"',
        b'"\\u0000"',
        b'"' + b"\\u0041" * 300_000 + b'"',
        b"{" + b",".join(b'"%d":0' % i for i in range(150_000)) + b"}",
        b"{" + b",".join(b'"same":%d' % i for i in range(150_000)) + b"}",
        b"[" + b"0," * 900_000 + b"0]",
        b"[" + b"[]," * 600_000 + b"[]]",
    ]
    bodies = [start + value + b"}" for value in values]
    bodies += [b"", b"\xef\xbb\xbf{}", b"null", b"[" * 2_000_000, b'{"a"' * 1000, encoded(CHAT) * 2]
    bodies += [b'{"model": "x", ' + b'"model": "eyas-nano", ' * 50_000 + b'"prompt": 5}']
    keys = ",".join(f'"{i}": 0' for i in range(100_000))
    bodies += [(f"{{{keys}, " + json.dumps(CHAT)[1:]).encode()]  # each unknown field is told in a header
    await post(target, tally, "/v1/chat/completions", bodies * 3)


async def numbers(target: Target, tally: Tally) -> None:
    """Parameters at and beyond their ends."""
    huge = [10**400, -(10**400), 2**63, -(2**63) - 1, 1e308, "\ud800", [[]], {}, True]
    names = "max_tokens temperature top_p top_k seed n stop logprobs logit_bias timeout priority".split()
    bodies = [encoded(TEXT | {name: value}) for name in names for value in huge]
    bodies += [encoded(TEXT | {"logit_bias": {str(i): 1 for i in range(100_000)}})]
    bodies += [encoded(TEXT | {"stop": [filled("a", 500)] * 16, "n": 16, "logprobs": 5})]
    bodies += [encoded(TEXT | {"bad_words": [filled("ab ", 600)] * 64}), encoded(TEXT | {"timeout": 1e-300})]
    await post(target, tally, "/v1/completions", bodies, at_once=8)


async def huge_prompts(target: Target, tally: Tally) -> None:
    """Texts that are hard to cut into tokens, far more than the context holds."""
    texts = [
        "a",
        "ab" * 50 + " ",
        "\n",
        " ",
        "é",
        "🏴\u200d",
        "\u0301",
        "1",
        "<|im_end|>",
        "\ud83d",
        "ﷺ",
        "a\u200b",
    ]
    bodies = [encoded(TEXT | {"prompt": filled(text)}) for text in texts[:9] + texts[10:]]
    bodies += [encoded(TEXT | {"prompt": "x" + texts[9]})]
    bodies += [encoded(TEXT | {"prompt": [7] * 500_000}), encoded(TEXT | {"prompt": [[7]] * 300_000})]
    bodies += [encoded(TEXT | {"prompt": ["a b"] * 200_000})]
    await post(target, tally, "/v1/completions", bodies)


async def a_flood_of_huge_prompts(target: Target, tally: Tally) -> None:
    """Ids that take long to read, more at a time than may wait."""
    await post(
        target, tally, "/v1/completions", [encoded(TEXT | {"prompt": [1234] * 300_000})] * 300, at_once=100
    )


# --- chats -------------------------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


async def huge_chats(target: Target, tally: Tally) -> None:
    said = CHAT["messages"][0]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": filled('{"a":', 500_000)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    changes: list[dict[str, Any]] = [
        {"messages": [said] * 40_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 50_000}]},
        {"messages": [{"role": "user", "content": filled("{% for i in range(9**9) %}{{ i }}")}]},
        {"messages": [said, {"role": "assistant", "content": None, "tool_calls": [call] * 3}, said]},
        {"messages": [said, {"role": "assistant", "content": filled("<think>")}, said]},
        {"chat_template_kwargs": {"x": filled("a")}},
        {"chat_template_kwargs": {f"x{i}": i for i in range(100_000)}},
        {"chat_template_kwargs": {"x": deep(90)}},
        {"chat_template_kwargs": {"messages": [], "tools": "x"}},
        {"chat_template_kwargs": {"chat_template": "{% for i in range(9**9) %}{% endfor %}"}},
        {"chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"},
        {"documents": [{"text": "a" * 1000}] * 1900},
        {"tools": [tool] * 10_000},
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(512)]},
        {
            "tools": [
                {"type": "function", "function": {"name": f"f{i}", "parameters": wide}} for i in range(30)
            ]
        },
        {"tools": [tool | {"function": {"name": "f", "description": filled("{{x}}")}}]},
        {"tools": [tool | {"function": {"name": "f", "parameters": deep(90)}}]},
        {
            "tools": [tool | {"function": {"name": "f", "parameters": {"$ref": "#"}}}],
            "tool_choice": "required",
        },
        {"prediction": {"type": "content", "content": filled("a b ")}},
    ]
    await post(target, tally, "/v1/chat/completions", [encoded(CHAT | change) for change in changes] * 2)


# --- grammars ----------------------------------------------------------------------------------------------


def objects(alternatives: int, properties: int) -> dict[str, Any]:
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    f"k{j}": {"type": ("string", "integer")[(i + j) % 2]} for j in range(properties)
                },
                "required": [f"k{i % properties}"],
            }
            for i in range(alternatives)
        ]
    }


def nested_choices(levels: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        choices = [{"type": "object", "properties": {f"p{i}": schema}} for i in range(width)]
        schema = {"anyOf": choices}
    return schema


def exploding() -> list[dict[str, Any]]:
    """Grammars whose compilation, size or masks explode, or that compilers are known to stumble over."""
    wrapped = ({"type": "json_schema", "json_schema": {"name": "x", "schema": one}} for one in schemas())
    return [*({"response_format": one} for one in wrapped), *patterns(), *rules(), *tags()]


def schemas() -> list[Any]:
    string: dict[str, Any] = {"type": "string"}
    return [
        {"enum": [f"{i:x}" * 8 for i in range(1000)]},
        {"type": "string", "maxLength": 10**9},
        {"type": "object", "properties": {f"p{i}": string | {"maxLength": 256} for i in range(200)}},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1900)}},
        {"type": "array", "items": string, "minItems": 10**6, "maxItems": 10**9},
        {"type": "array", "prefixItems": [string] * 1500},
        {"type": "integer", "minimum": -(10**18), "maximum": 10**18 - 7},
        {"type": "number", "minimum": 1e-300, "maximum": 1e300},
        {"$ref": "#"},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
        {"type": "string", "pattern": "(a|a)*" * 40 + "b"},
        {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
        {"type": "object", "patternProperties": {"^" + "(a|b|ab)*" * 30 + "$": string}},
        objects(100, 30),
        nested_choices(6, 4),
    ]


def patterns() -> list[dict[str, Any]]:
    texts = [
        "(((((a{0,50}){0,50}){0,50}){0,50}){0,50})",
        "(a*)*" * 2000,
        "(x+x+)+y",
        "a{1,100000}",
        "(" * 120 + "a" + ")*" * 120,
        "|".join(f"word{i}" for i in range(6000)),
        "[\\u0000-\\uffff]{0,5000}",
        ".*" * 20_000,
        "(?=a)b",
        "\\p{L}+",
        "[z-a]",
        "(",
    ]
    return [{"guided_regex": one} for one in texts]


def rules() -> list[dict[str, Any]]:
    texts = [
        "root ::= root root | root",
        "root ::= a\na ::= b\nb ::= a",
        'root ::= a a a a a a\na ::= b{100}\nb ::= c{100}\nc ::= d{100}\nd ::= "x"{100}',
        "root ::= " + " | ".join(f'"{i}"' for i in range(7000)),
        "\n".join(
            [*(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(2000)), 'root ::= r0\nr2000 ::= "b"']
        ),
        'root ::= ("a" | "a" "a" | "a" "a" "a")* "b"',
        "root ::= nowhere",
    ]
    return [{"guided_grammar": one} for one in texts]


def tags() -> list[dict[str, Any]]:
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    triggered = {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [tag | {"begin": f"<{i}>"} for i in range(500)],
    }
    return [
        {"guided_choice": ["a" * i for i in range(1, 300)]},
        {"response_format": {"type": "structural_tag", "format": triggered}},
        {
            "response_format": {
                "type": "structural_tag",
                "format": {"type": "sequence", "elements": [tag] * 400},
            }
        },
    ]


async def grammars(target: Target, tally: Tally) -> None:
    await post(target, tally, "/v1/chat/completions", [encoded(CHAT | asked) for asked in exploding()], 3)


async def a_crowd_of_grammars(target: Target, tally: Tally) -> None:
    """More slow grammars at a time than may wait, none of them twice the same."""
    bodies = []
    for i in range(90):
        slow = {
            "type": "object",
            "properties": {f"p{i}_{j}": {"type": "string", "maxLength": 900 + j} for j in range(150)},
        }
        bodies.append(encoded(CHAT | {"guided_json": slow}))
    await post(target, tally, "/v1/chat/completions", bodies, at_once=90)


BODIES: list[Attack] = [
    attack("hostile JSON", hostile_json, "200 400 413", 10),
    attack("numbers beyond their ends", numbers, "200 400 504", 15),
    attack("prompts of 2 MB", huge_prompts, "200 400 413", 60),
    attack("300 prompts of 300,000 ids", a_flood_of_huge_prompts, "400 429", 30),
    attack("chats and tools of 2 MB", huge_chats, "200 400 413", 60),
    attack("37 grammars that explode", grammars, "200 400", 45),
    attack("90 slow grammars at once", a_crowd_of_grammars, "200 400 429", 90),
]
