"""A small hub on this machine, with the few routes by which `huggingface_hub` lists and fetches models."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub(ThreadingHTTPServer):
    """`models`: the files of each name. `gated`: names for those with the token "right" alone.

    `fetched`: the files that were sent. `held`: those that stop half-way until `go` is set; then `half` is.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Mapping[str, bytes]] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        self.held: set[str] = set()
        self.half, self.go = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """A hub that runs until the block ends."""
    with LocalHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.go.set()
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        files = self.server.models.get(name)
        if files is None:
            self._refuse(401, "RepoNotFound")
        elif name in self.server.gated and self.headers.get("Authorization") != "Bearer right":
            self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif not api:
            self._file("/".join(rest[2:]), files, body)
        else:
            self._json(_tree(files) if rest[:1] == ["tree"] else _about(name, files))

    def _file(self, path: str, files: Mapping[str, bytes], body: bool) -> None:
        content = files[path]
        self.send_response(200)
        self._head(len(content), ETag=f'"{_id(content)}"', **{"X-Repo-Commit": COMMIT})
        if body and path in self.server.held:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.half.set()
            self.server.go.wait(60)
        elif body:
            self.server.fetched.append(path)
            self.wfile.write(content)

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self._head(len(content), **{"Content-Type": "application/json"})
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self._head(0, **{"X-Error-Code": code, "X-Error-Message": "no"})

    def _head(self, length: int, **headers: str) -> None:
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": path, "size": len(content), "oid": _id(content)}
        for path, content in files.items()
    ]


def _about(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    siblings = [
        {"rfilename": path, "size": len(content), "blobId": _id(content)} for path, content in files.items()
    ]
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
