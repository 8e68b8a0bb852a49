"""A server that answers OpenAI's completions by a script: for tests of clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Script = Callable[[Body], str | tuple[int, Any]]
"""From a request's body to the answer's text, or to a status and a body of its own: JSON, or bytes."""

MODELS = {"data": [{"id": "scripted", "owned_by": "eyas"}]}


@dataclass
class Scripted:
    """The server's address, and what it was sent."""

    url: str
    paths: list[str] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    """The most requests that it had at a time."""

    @property
    def flag(self) -> tuple[str, str]:
        """The flag that names it."""
        return "--url", self.url


@contextmanager
def scripted(
    script: Script, extra: Body | None = None, models: tuple[int, Any] = (200, MODELS)
) -> Iterator[Scripted]:
    """Serves `script` on a free port. Answers have the fields of `extra` too, `models` answers GET."""
    lock, open_now = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                served.paths.append(self.path)
                served.bodies.append(body)
                served.keys.append(self.headers["authorization"])
                open_now[0] += 1
                served.at_once = max(served.at_once, open_now[0])
            said = script(body)
            with lock:
                open_now[0] -= 1
            self.reply(*(said if isinstance(said, tuple) else (200, answer(body, said))))

        def reply(self, status: int, value: Any) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    def answer(body: Body, text: str) -> Body:
        said = {"message": {"content": text}} if "messages" in body else {"text": text}
        return {"choices": [{**said, "finish_reason": "stop"}], **(extra or {})}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Scripted(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
