"""docker/compose.yaml without Docker: every service's own command line as a local process, and a chat.

Host names become 127.0.0.1 and ports become free ones; nothing else in a command line changes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from eyas.worker.ports import free_ports
from tests.e2e.served import wait_until
from tests.rpc.redis_server import SERVER

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0
STOP_S = 45.0  # a worker that is asked to leave may wait for leases
PORTS = {"redis": ("6379",), "gateway": ("8000", "8001")}
OF_WORKERS = ("7000", "9000")

Services = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def services() -> Services:
    found: Services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    return found


# --- a compose file as local processes -----------------------------------------------------------------


class Hosts:
    """Where the containers' addresses are on this machine."""

    def __init__(self, services: Services) -> None:
        self._here: dict[tuple[str, str], str] = {}
        for name in services:
            for port in PORTS.get(name, OF_WORKERS):
                self._here[name, port] = str(next(free_ports()))

    def port(self, name: str, port: str) -> str:
        return self._here[name, port]

    def argv(self, name: str, words: list[str]) -> list[str]:
        """A command line of container `name`."""
        before = ["", *words]
        return [
            "127.0.0.1" if flag == "--host" else self._word(name, w)
            for flag, w in zip(before, words, strict=False)
        ]

    def _word(self, name: str, word: str) -> str:
        if (name, word) in self._here:
            return self._here[name, word]
        for (host, port), here in self._here.items():
            word = word.replace(f"{host}:{port}", f"127.0.0.1:{here}")
        return word.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{self.port('gateway', '8000')}")


@dataclass
class Stack:
    """The running services, by name, and the files of what they say."""

    processes: dict[str, subprocess.Popen[bytes]]
    hosts: Hosts
    logs: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.hosts.port('gateway', '8000')}"

    def said(self, name: str) -> str:
        return (self.logs / name).read_text(errors="replace")


def program(name: str, service: dict[str, Any]) -> list[str]:
    """What the container runs, with the programs of this machine."""
    if service["image"].startswith("redis:"):
        return [str(SERVER), *service["command"][1:]]
    entrypoint = service.get("entrypoint", [sys.executable, "-m", "eyas.cli"])
    return [*entrypoint, *service.get("command", [])]


def check(service: dict[str, Any]) -> list[str]:
    """The service's health check, with the programs of this machine."""
    how, *command = service["healthcheck"]["test"]
    assert how == "CMD"
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    return [str(SERVER.with_name("redis-cli")), "-p", "6379", *command[1:]]


@contextlib.contextmanager
def running(services: Services) -> Iterator[Stack]:
    """All services, healthy, in the order of the file; afterwards none."""
    hosts = Hosts(services)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        up = Stack({}, hosts, Path(folder))
        for name, service in services.items():
            log = stack.enter_context((up.logs / name).open("wb"))
            argv = hosts.argv(name, program(name, service))
            up.processes[name] = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_healthy(up, services)
            yield up
        finally:
            stop(list(up.processes.values()))


def wait_healthy(up: Stack, services: Services) -> None:
    deadline = time.monotonic() + START_S
    for name, service in services.items():
        while "healthcheck" in service:
            done = subprocess.run(
                up.hosts.argv(name, check(service)), cwd=ROOT, capture_output=True, timeout=20
            )
            if done.returncode == 0:
                break
            assert up.processes[name].poll() is None, f"{name} ended:\n{up.said(name)}"
            assert time.monotonic() < deadline, f"{name} is not healthy:\n{done.stderr!r}\n{up.said(name)}"
            time.sleep(0.5)


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- what the file promises ----------------------------------------------------------------------------


def test_the_file_has_every_service(services: Services) -> None:
    workers = {name: s for name, s in services.items() if s.get("command", [""])[0] == "worker"}
    roles = sorted(s["command"][s["command"].index("--roles") + 1] for s in workers.values())
    assert roles == ["decode", "decode", "draft", "prefill", "prefill"]
    assert services.keys() - workers.keys() == {"redis", "gateway", "shm"}
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert "healthcheck" in service or name == "shm", name
    for worker in workers.values():
        assert worker["ipc"] == worker["pid"] == "service:shm"
    assert services["shm"]["ipc"] == "shareable" and services["shm"]["shm_size"]


def test_the_stack_answers(services: Services) -> None:
    """Eight chats at once say the same; and the draft worker was found too, though not by its address."""
    with running(services) as up, concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: chat(up.url), range(8)))
        texts = {answer["choices"][0]["message"]["content"] for answer in answers}
        assert len(texts) == 1 and "Paris" in texts.pop()
        wait_until(lambda: drafted(chat(up.url)) > 0, 20)
    assert all(process.returncode is not None for process in up.processes.values())


def chat(url: str) -> dict[str, Any]:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "eyas-nano", "messages": [question], "max_tokens": 32, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def drafted(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])
