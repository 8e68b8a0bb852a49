"""Hostile HTTP over bare sockets: every route, bodies nearly right, broken, half sent, lied about.

It knows how to speak wrongly and what an answer to that may be. It refuses to know what the server runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fuzz.values import WORDS, any_json, broken, mutated

READ_S = 3.0  # a stream that runs longer is hung up on
ALLOWED = {200, 204, 400, 401, 404, 405, 408, 411, 413, 414, 422, 429, 431, 501, 503, 504, 505}
HEALTHY_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "eyas-nano",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 4,
        "stream": True,
    },
    "/v1/completions": {
        "model": "eyas-nano",
        "prompt": "Hello",
        "max_tokens": 4,
        "logprobs": 1,
        "echo": True,
    },
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "top_k": -1}, "stream": False},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6, 7]},
}


@dataclass
class Answers:
    """What came back: how often each status, and every answer that must not be."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class HttpFuzz:
    """`attack` sends one random request; routes and fields are those that the server describes."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = httpx.URL(url)
        self._rng = random.Random(f"http/{seed}")
        self._routes: list[tuple[str, str]] = []
        self._fields: dict[str, list[str]] = {}
        self.answers = Answers()

    async def learn(self) -> None:
        """Reads /openapi.json: every route with its method, and the names of its body's fields."""
        async with httpx.AsyncClient(base_url=self._url, trust_env=False) as http:
            described = (await http.get("/openapi.json")).json()
        for path, methods in described["paths"].items():
            self._routes += [(method.upper(), path) for method in methods]
            for operation in methods.values():
                self._fields[path] = sorted(_properties(operation, described))

    @property
    def routes(self) -> set[str]:
        return {path for _, path in self._routes}

    async def attack(self) -> None:
        method, path = self._rng.choice(self._routes)
        head, body = self._request(
            method, path.replace("{name}", self._rng.choice(("eyas-nano", "%00", "a/b")))
        )
        status, text = await self._exchange(head + body)
        self.answers.statuses[status] += 1
        if status and (status not in ALLOWED or status >= 400 and not _tells_why(text)):
            self.answers.wrong.append(
                f"{method} {path} -> {status} {text[:300]!r} for {head[:200]!r} {body[:600]!r}"
            )

    def _request(self, method: str, path: str) -> tuple[bytes, bytes]:
        rng = self._rng
        if rng.random() < 0.1:
            method = rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW"))
        body = self._body(path)
        headers = {"host": "eyas", "content-type": "application/json", "connection": "close"}
        length = str(len(body))
        lie = rng.random()
        if lie < 0.05:
            length = rng.choice((str(len(body) + 50), "-1", "1e3", "9" * 30, str(max(0, len(body) - 5))))
        if 0.05 < lie < 0.1:
            headers["transfer-encoding"] = "chunked"
            body = rng.choice(
                (b"5\r\nhell", b"zz\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), b"ffffffff\r\n{}")
            )
        else:
            headers["content-length"] = length
        if rng.random() < 0.1:
            headers[rng.choice(("x-a", "authorization", "x-request-id", "accept", "expect", "cookie"))] = (
                rng.choice(("", "100-continue", "Bearer x", "a" * 9000, "\x01", "é"))
            )
        query = rng.choice(("",) * 8 + ("?a=b", "?" + "q" * 3000, "?%zz"))
        lines = [
            f"{method} {path}{query} HTTP/1.{rng.choice('1110')}",
            *(f"{k}: {v}" for k, v in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace"), body

    def _body(self, path: str) -> bytes:
        rng, right = self._rng, HEALTHY_BODIES.get(path, {})
        if rng.random() < 0.1:
            return json.dumps(any_json(rng)).encode()
        text = json.dumps(mutated(rng, right, self._fields.get(path, []) or list(WORDS[2:5]))).encode()
        return broken(rng, text) if rng.random() < 0.25 else text

    async def _exchange(self, sent: bytes) -> tuple[int, bytes]:
        """(status, what came), 0 for none; sometimes only half is sent, or the client leaves at once."""
        manner = self._rng.random()
        half = self._rng.randrange(len(sent))
        try:
            reader, writer = await asyncio.open_connection(self._url.host, self._url.port)
        except OSError as error:
            self.answers.wrong.append(f"no connection: {error}")
            return 0, b""
        try:
            writer.write(sent[:half] if manner < 0.1 else sent)
            await writer.drain()
            if manner < 0.05:
                return 0, b""
            if manner < 0.1 and writer.can_write_eof():
                writer.write_eof()
            came = bytearray()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_S):
                    while part := await reader.read(65536):
                        came += part
            head, _, rest = bytes(came).partition(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.") else 0, rest
        except (ConnectionError, OSError):
            return 0, b""
        finally:
            writer.close()


def _tells_why(text: bytes) -> bool:
    """OpenAI's error body, the one-line body of a connection's own refusal, or none (HEAD)."""
    try:
        return bool(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return len(text) < 100


def _properties(schema: Any, described: dict[str, Any]) -> set[str]:
    """All names of properties below a schema, references followed."""
    names: set[str] = set()
    if isinstance(schema, dict):
        if reference := schema.get("$ref"):
            target: Any = described
            for part in reference.removeprefix("#/").split("/"):
                target = target[part]
            return _properties(target, described)
        names |= set(schema.get("properties", ()))
        for value in schema.values():
            names |= _properties(value, described)
    elif isinstance(schema, list):
        for value in schema:
            names |= _properties(value, described)
    return names
