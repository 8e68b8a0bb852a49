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

READ_S = 4.0  # a stream that runs longer is hung up on
DRIP_S = 0.02
ALLOWED = {200, 307, 400, 403, 404, 405, 408, 413, 429, 431}
"""307: the path has a slash too many."""
CRASHED = b"internal_error"  # in an event of a stream
HEALTHY_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "model": "eyas-nano",
            "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "seed": 3,
        },
        {
            "model": "eyas-nano",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Count to five."}]},
            ],
            "max_completion_tokens": 200,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 3,
            "stop": ["five"],
            "stream": True,
        },
        {
            "model": "eyas-nano",
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 6,
            "logit_bias": {"5": -100},
        },
    ],
    "/v1/completions": [
        {"model": "eyas-nano", "prompt": "Hello", "max_tokens": 4, "logprobs": 1, "echo": True},
        {
            "model": "eyas-nano",
            "prompt": [[5, 6, 7], [8]],
            "max_tokens": 30,
            "stream": True,
            "ignore_eos": True,
            "top_k": 5,
        },
        {"model": "eyas-nano", "prompt": ["Hi", "Ho"], "max_tokens": 0, "echo": True, "logprobs": 2},
    ],
    "/generate": [
        {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "top_k": -1}, "stream": False},
        {"input_ids": [[5, 6]], "sampling_params": {"max_new_tokens": 20, "n": 2}, "stream": True},
        {
            "text": "Hi",
            "sampling_params": {"max_new_tokens": 3},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    ],
    "/tokenize": [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hi"}]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
}


@dataclass
class Answers:
    """What came back: how often each status of each path (0: none), and every answer that must not be."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def of(self, status: int) -> int:
        return sum(count for (_, seen), count in self.statuses.items() if seen == status)


@dataclass(frozen=True)
class Sent:
    """One request's bytes. `honest`: it is as long as it says, so that it must be answered."""

    head: bytes
    body: bytes
    honest: bool


class HttpFuzz:
    """`attack` sends one random request; routes and fields are those that the server describes."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = httpx.URL(url)
        self._rng = random.Random(f"http/{seed}")
        self._routes: list[tuple[str, str]] = []
        self._fields: dict[str, list[str]] = {}
        self.answers = Answers()

    async def learn(self) -> None:
        """Reads /openapi.json: every route with its method, and the names of its body's fields.

        Asserts that the healthy bodies are answered: what comes of them is not deep otherwise.
        """
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=30) as http:
            described = (await http.get("/openapi.json")).json()
            for path, bodies in HEALTHY_BODIES.items():
                for body in bodies:
                    reply = await http.post(path, json=body)
                    assert reply.status_code == 200, (path, body, reply.text)
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                weight = 8 if path in HEALTHY_BODIES else 1
                self._routes += [(method.upper(), path)] * weight
                self._fields[path] = sorted(_properties(operation.get("requestBody"), described))

    @property
    def routes(self) -> set[str]:
        return {path for _, path in self._routes}

    async def attack(self) -> None:
        method, path = self._rng.choice(self._routes)
        if self._rng.random() < 0.05:
            method = self._rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW"))
        sent = self._request(method, path)
        status, text, ended = await self._exchange(sent)
        self.answers.statuses[path, status] += 1
        if _is_wrong(sent, status, text, ended):
            told = f"{method} {path} -> {status} {text[:300]!r}"
            self.answers.wrong.append(f"{told} for {sent.head[:300]!r} {sent.body[:600]!r}")

    # --- what is sent ------------------------------------------------------------------------------------

    def _request(self, method: str, path: str) -> Sent:
        rng = self._rng
        body = self._body(path) if method != "GET" or rng.random() < 0.1 else b""
        headers = {"host": "localhost", "content-type": "application/json", "connection": "close"}
        honest = True
        framing = rng.random()
        if framing < 0.05:
            lies = (str(len(body) + 50), "-1", "1e3", "9" * 30, str(max(0, len(body) - 5)))
            headers["content-length"], honest = rng.choice(lies), False
        elif framing < 0.1:
            headers["transfer-encoding"], honest = "chunked", False
            body = rng.choice(
                (b"5\r\nhell", b"zz\r\n", b"ffffffff\r\n{}", b"-1\r\n\r\n", _chunked(body) + b"x")
            )
        elif framing < 0.2:
            headers["transfer-encoding"] = "chunked"
            body = _chunked(body, trailer=rng.choice((b"", b"x-end: 1\r\n")))
        else:
            headers["content-length"] = str(len(body))
        if rng.random() < 0.1:
            name = rng.choice(("x-a", "authorization", "x-request-id", "accept", "content-type", "cookie"))
            headers[name] = rng.choice(("", "Bearer x", "a" * 9000, "\x01", "é", "gzip, deflate"))
        if rng.random() < 0.05:
            headers["expect"] = "100-continue"
        if rng.random() < 0.02:
            headers |= {f"x-{i}": "a" for i in range(rng.choice((50, 200)))}
        lines = [
            f"{method} {self._target(path)} HTTP/1.{rng.choice('1110')}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return Sent("\r\n".join([*lines, "", ""]).encode("latin-1", "replace"), body, honest)

    def _target(self, path: str) -> str:
        rng = self._rng
        path = path.replace("{name}", rng.choice(("eyas-nano", "%00", "a/b", "%ff", "..%2f")))
        query = rng.choice(("",) * 12 + ("?a=b", "?" + "q" * 3000, "?%zz"))
        origin = rng.choice(("",) * 20 + ("http://localhost", "http://elsewhere:1"))
        return origin + path + query

    def _body(self, path: str) -> bytes:
        rng = self._rng
        right = rng.choice(HEALTHY_BODIES.get(path, [{}]))
        manner = rng.random()
        if manner < 0.05:
            return json.dumps(any_json(rng)).encode()
        if manner < 0.45:
            return json.dumps(right).encode()
        changed = mutated(rng, right, self._fields.get(path) or list(WORDS[2:5]))
        text = json.dumps(changed).encode()
        return broken(rng, text) if manner < 0.6 else text

    # --- how it is sent ----------------------------------------------------------------------------------

    async def _exchange(self, sent: Sent) -> tuple[int, bytes, bool]:
        """(status, body, whether the server ended the answer); status 0: none came."""
        try:
            reader, writer = await asyncio.open_connection(self._url.host, self._url.port)
        except OSError as error:
            self.answers.wrong.append(f"no connection: {error}")
            return 0, b"", False
        try:
            whole = await self._send(writer, sent)
            came, ended = await self._receive(reader)
        except OSError:
            return 0, b"", False
        finally:
            writer.close()
        head, _, rest = came.partition(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100 "):
            head, _, rest = rest.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.") else 0
        return status, rest, ended and whole

    async def _send(self, writer: asyncio.StreamWriter, sent: Sent) -> bool:
        """Mostly all at once, sometimes in drops, sometimes half of it. Was it all?"""
        raw, manner = sent.head + sent.body, self._rng.random()
        if manner < 0.1:
            writer.write(raw[: self._rng.randrange(len(raw))])
            if manner < 0.05:
                writer.write_eof()
        elif manner < 0.2:
            size = max(1, len(raw) // 20)
            for start in range(0, len(raw), size):
                writer.write(raw[start : start + size])
                await writer.drain()
                await asyncio.sleep(DRIP_S)
        else:
            writer.write(raw)
        await writer.drain()
        return manner >= 0.1

    async def _receive(self, reader: asyncio.StreamReader) -> tuple[bytes, bool]:
        """Until the end, or for READ_S; some clients leave after the first bytes, or before."""
        came, leaves = bytearray(), self._rng.random()
        if leaves < 0.05:
            return b"", False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                while part := await reader.read(65536):
                    came += part
                    if leaves < 0.15:
                        return bytes(came), False
                return bytes(came), True
        return bytes(came), False


def _chunked(body: bytes, trailer: bytes = b"") -> bytes:
    half = len(body) // 2
    parts = [part for part in (body[:half], body[half:]) if part]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


def _is_wrong(sent: Sent, status: int, text: bytes, ended: bool) -> bool:
    """An honest request without an answer, an answer that blames the server, or one that explains nothing."""
    if status == 0:
        return sent.honest and ended
    return status not in ALLOWED or CRASHED in text or status >= 400 and not _tells_why(text)


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
