"""A server with a script: it answers the load client's requests in a thread of its own, as it was told to."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Script:
    """What the server does. `gap_s`: between the events of a stream; the first comes after `first_s`."""

    first_s: float = 0.0
    gap_s: float = 0.0
    refuse: Callable[[int], bool] = lambda number: False
    """Whether the request of this number, from 0, gets a 400."""
    breaks: Callable[[int], bool] = lambda number: False
    """Whether its connection ends in the middle."""
    pages: dict[str, object] = field(default_factory=lambda: {"/v1/models": {"data": [{"id": "stub"}]}})
    """What a GET gives, as JSON; others are not found."""
    asked: list[tuple[str, Body]] = field(default_factory=list)
    """Path and body of every POST, in order."""
    heads: list[str] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The URL of a server that follows `script`, which may change on the way."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(lambda r, w: _answer(script, r, w), "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split(" ", 2)
    length = int(head.lower().partition("content-length:")[2].split()[0])
    content = await reader.readexactly(length)
    script.heads.append(head)
    try:
        if method == "GET":
            found = path in script.pages
            _whole(writer, 200 if found else 404, json.dumps(script.pages.get(path)))
        else:
            await _post(script, path, json.loads(content), writer)
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _post(script: Script, path: str, body: Body, writer: asyncio.StreamWriter) -> None:
    number = len(script.asked)
    script.asked.append((path, body))
    script.asked_at.append(time.perf_counter())
    if script.refuse(number):
        _whole(writer, 400, '{"error": "not today"}')
        return
    script.running += 1
    script.most_running = max(script.most_running, script.running)
    try:
        await _stream(script, path, body, writer, 2 if script.breaks(number) else None)
    finally:
        script.running -= 1


async def _stream(
    script: Script, path: str, body: Body, writer: asyncio.StreamWriter, events: int | None
) -> None:
    """Sends a token per event, `events` of them if it breaks off."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    params = body.get("sampling_params", body)
    tokens = params.get("max_tokens") or params["max_new_tokens"]
    for number in range(tokens):
        if number == events:
            return
        await asyncio.sleep(script.gap_s if number else script.first_s)
        _event(writer, _said(path, number))
        await writer.drain()
    if path != "/generate":
        _event(writer, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
    _event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def _said(path: str, number: int) -> object:
    if path == "/generate":
        text = " ".join(map(str, range(number + 1)))
        return {"text": text, "meta_info": {"completion_tokens": number + 1, "prompt_tokens": 3}}
    said = f"{number} "
    return {"choices": [{"delta": {"content": said}} if "chat" in path else {"text": said}]}


def _event(writer: asyncio.StreamWriter, said: object) -> None:
    data = f"data: {said if isinstance(said, str) else json.dumps(said)}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    writer.write(f"HTTP/1.1 {status} So\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
