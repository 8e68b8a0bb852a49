"""Flags of `eyas serve` whose effect only a whole server shows: names, seeds, logs, a proxy, a tokenizer."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from eyas.common.config import NANO
from tests.e2e.served import Folders, Served, serving, wait_until
from tests.unit.tokenizer_families import write_tokenizer

NAMES = ["eyas-nano", "org/two"]
CHAT = {"model": "eyas-nano", "messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 24}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOnce upon a time{% endif %}"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine takes minutes to start a cluster


@contextlib.contextmanager
def started(*flags: str) -> Iterator[Served]:
    """The embedded model in one worker, without drafts."""
    with serving(Folders(str(NANO), "none"), "--layout", "unified", *flags) as served:
        yield served


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=60, trust_env=False)


def post(url: str, body: Any) -> httpx.Response:
    return httpx.post(url, json=body, timeout=60, trust_env=False)


def ask(url: str, path: str = "/v1/chat/completions", **body: Any) -> Any:
    found = post(url + path, CHAT | body)
    assert found.status_code == 200, found.text
    return found.json()


def said(url: str, **body: Any) -> str:
    return str(ask(url, **body)["choices"][0]["message"]["content"])


@contextlib.contextmanager
def stripping_proxy(prefix: str, port: int) -> Iterator[str]:
    """A reverse proxy that shows a server below `prefix`, and takes that off. Gives its address."""

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            server.request(self.command, self.path.removeprefix(prefix) or "/", body, kept)
            reply = server.getresponse()
            content = reply.read()
            self.send_response(reply.status)
            for name in ("content-type", "location"):
                if reply.headers[name]:
                    self.send_header(name, reply.headers[name])
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            server.close()

        do_GET = do_POST = forward

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix}"
        server.shutdown()
        thread.join()


def restarted(served: Served, command: str) -> None:
    """Kills a process of the cluster, and waits until another one serves in its place."""
    before = process_of(served, command)
    before.kill()
    wait_until(lambda: process_of(served, command, before.pid) is not None, 180)
    wait_until(lambda: answers(served.url), 180)


def process_of(served: Served, command: str, other_than: int = 0) -> Any:
    for process in served.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if (
                process.pid != other_than
                and command in process.cmdline()
                and "--supervised" in process.cmdline()
            ):
                return process
    return None


def answers(url: str) -> bool:
    try:
        found = post(url + "/v1/chat/completions", CHAT)
    except httpx.HTTPError:
        return False
    return found.status_code == 200


def levels(served: Served) -> set[str]:
    """The first letters of the levels of all lines of logs."""
    found = (re.match(r"\[\S+\] \d\d:\d\d:\d\d ([A-Z]) ", line) for line in served.lines)
    return {line[1] for line in found if line}


def test_names_a_proxy_and_a_debug_log() -> None:
    flags = ["--served-model-name", *NAMES, "--root-path", "/x", "--log-level", "debug"]
    with started(*flags) as served:
        listed = get(served.url + "/v1/models").json()["data"]
        assert [model["id"] for model in listed] == NAMES
        assert [ask(served.url, model=name)["model"] for name in NAMES] == NAMES
        assert post(served.url + "/v1/chat/completions", CHAT | {"model": "two"}).status_code == 404
        with stripping_proxy("/x", served.port) as proxy:
            assert ask(proxy)["object"] == "chat.completion"
            assert get(proxy + "/openapi.json").json()["servers"] == [{"url": "/x"}]
            assert 'fetch("openapi.json")' in get(proxy + "/docs").text
            assert get(proxy + "/").headers["content-type"].startswith("text/html")
            assert get(proxy + "/health").json()["status"] == "ok"
        assert ask(served.url + "/x")["object"] == "chat.completion", "and one that leaves it on"
        wait_until(lambda: served.says("prompt tokens and 1 choices of at most 24 tokens"), 20)
        assert levels(served) >= {"D", "I"}


def test_a_seed_outlives_restarts_and_warnings_alone_are_logged() -> None:
    with started("--seed", "7", "--log-level", "warning") as served:
        first = said(served.url, temperature=2.0)
        assert said(served.url, temperature=2.0) == first
        assert said(served.url, temperature=2.0, seed=8) != first
        restarted(served, "worker")
        restarted(served, "gateway")
        wait_until(lambda: answers(served.url), 180)
        assert said(served.url, temperature=2.0) == first
        assert levels(served) <= {"W", "E"}


def test_every_process_has_the_tokenizer_of_another_folder(tmp_path: Path) -> None:
    """Two letters have each other's ids there: a grammar of the worker's own would write the other one."""
    folder = str(write_tokenizer(tmp_path / "t"))
    with started("--tokenizer", folder, "--chat-template", TEMPLATE) as served:
        info = get(served.url + "/get_model_info").json()
        assert (info["model_path"], info["tokenizer_path"]) == (str(NANO), folder)
        assert said(served.url, structured_outputs={"regex": "Y{5}"}, temperature=0.0) == "YYYYY"
        tokens = ask(served.url, "/tokenize", prompt=None)["tokens"]
        asked = {"tokens": tokens, "skip_special_tokens": False}
        text = post(served.url + "/detokenize", asked).json()["prompt"]
        assert text.endswith("<|im_start|>assistant\nOnce upon a time")
