"""docker/compose.yaml without Docker: every service's own command line as a local process, and a chat.

Host names become 127.0.0.1 and ports become free ones; nothing else in a command line changes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
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

from eyas import cli
from eyas.common.cluster.listening import free_ports
from eyas.common.config import SHARED_MEMORY
from tests.e2e.served import wait_until
from tests.rpc.redis_server import SERVER

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
STOP_S = 45.0  # a worker that is asked to leave may wait for leases
PORTS = {"redis": ("6379",), "gateway": ("8000", "8001")}
OF_WORKERS = ("7000", "9000")
REGISTRY = ("--registry", "redis://redis:6379/0")  # as the variable EYAS_REGISTRY says
VARIABLE = re.compile(r"\$\$|\$\{\w+(?::-(?P<default>[^}]*)|:\?[^}]*)?\}")

Services = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def services() -> Services:
    return described("compose.yaml")


def described(name: str) -> Services:
    """The services of a compose file, with the defaults of its variables."""
    found: Services = interpolated(yaml.safe_load((ROOT / "docker" / name).read_text()))["services"]
    return found


def interpolated(value: Any) -> Any:
    """As Compose reads it where no variable is set: `$$` is a dollar, `${NAME:-default}` the default."""
    if isinstance(value, dict):
        return {key: interpolated(each) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each) for each in value]
    if not isinstance(value, str):
        return value
    return VARIABLE.sub(lambda m: "$" if m.group() == "$$" else m.group("default") or "", value)


def instances(services: Services) -> Services:
    """One per container: a service with replicas has several, `decode-0` and `decode-1`."""
    every: Services = {}
    for name, service in services.items():
        count = service.get("deploy", {}).get("replicas")
        every |= {name: service} if count is None else {f"{name}-{n}": service for n in range(count)}
    return every


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

    def environment(self, service: dict[str, Any], folder: Path) -> dict[str, str]:
        """The variables of a container that has this machine's address."""
        redis = f"redis://127.0.0.1:{self.port('redis', '6379')}/0"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {name: str(value) for name, value in service.get("environment", {}).items()}
        own |= {"EYAS_REGISTRY": redis, "EYAS_ADVERTISE": "127.0.0.1", "PATH": path, "POOLS": str(folder)}
        return dict(os.environ) | own

    def _word(self, name: str, word: str) -> str:
        if (name, word) in self._here:
            return self._here[name, word]
        for port in PORTS.get(name, OF_WORKERS):
            word = word.replace(f"127.0.0.1:{port}", f"127.0.0.1:{self.port(name, port)}")
        return word.replace("--pool-dir /pools", '--pool-dir "$POOLS"')


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


def program(service: dict[str, Any]) -> list[str]:
    """What the container runs, with the programs of this machine."""
    if service["image"].startswith("redis:"):
        return [str(SERVER), *service["command"][1:]]
    return [*service["entrypoint"], *service.get("command", [])]


def check(service: dict[str, Any]) -> list[str]:
    """The service's health check, with the programs of this machine."""
    test = service["healthcheck"]["test"]
    how, *command = ["CMD", *test.split()] if isinstance(test, str) else test
    assert how == "CMD"
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    return [str(SERVER.with_name("redis-cli")), "-p", "6379", *command[1:]]


@contextlib.contextmanager
def running(services: Services) -> Iterator[Stack]:
    """All containers, healthy, in the order of the file; afterwards none."""
    services = instances(services)
    hosts = Hosts(services)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        up = Stack({}, hosts, Path(folder))
        pools = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        for name, service in services.items():
            log = stack.enter_context((up.logs / name).open("wb"))
            argv, variables = hosts.argv(name, program(service)), hosts.environment(service, pools)
            up.processes[name] = subprocess.Popen(
                argv, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT
            )
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
    workers = {name: s for name, s in services.items() if s.get("entrypoint", [""])[-1] == "worker"}
    roles = sorted(s["command"][s["command"].index("--roles") + 1] for s in instances(workers).values())
    assert roles == ["decode", "decode", "draft", "prefill", "prefill"]
    assert services.keys() - workers.keys() == {"redis", "gateway", "init"}
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert "healthcheck" in service or name == "init", name
        assert name == "init" or service["deploy"]["resources"]["limits"]["memory"], name
        assert "ports" not in service or name == "gateway"  # of which a scaled service has none on the host
    for worker in workers.values():
        assert worker["pid"] == "service:init" and "pools:/pools" in worker["volumes"]


def test_the_model_is_named_once(services: Services) -> None:
    """Gateway and workers take it from the same variables, and its folder from the same volume."""
    raw = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for name in ("gateway", "prefill", "decode", "draft"):
        assert raw[name]["environment"]["EYAS_MODEL"] == "${EYAS_MODEL:-}", name
        assert "${EYAS_MODELS:-models}:/models:ro" in raw[name]["volumes"], name
        assert '${EYAS_MODEL:+--model "$EYAS_MODEL"} $EYAS_FLAGS' in services[name]["entrypoint"][2], name


def test_every_variable_is_in_the_table_of_the_readme() -> None:
    table = re.findall(r"^\| (`EYAS.*?) \|", (ROOT / "docker" / "README.md").read_text(), re.MULTILINE)
    files = (ROOT / "docker").glob("*.yaml")
    used = {name for file in files for name in re.findall(r"(?<!\$)\$\{(\w+)", file.read_text())}
    assert used == set(re.findall(r"`(\w+)`", " ".join(table)))


@pytest.mark.parametrize("over", ["secure.yaml", "podman.yaml", "gpu.yaml"])
def test_a_file_over_it_names_services_that_are_there(over: str, services: Services) -> None:
    assert described(over).keys() <= services.keys()


@pytest.mark.parametrize("over", ["compose.yaml", "secure.yaml", "gpu.yaml"])
def test_the_parser_takes_every_command_line(over: str, services: Services) -> None:
    for name, service in described(over).items():
        if "command" in service and name != "redis":
            command = services[name]["entrypoint"][-1]
            assert cli._parser().parse_args([command, *REGISTRY, *service["command"]]).command == command


def test_on_gpus_each_worker_has_its_own(services: Services) -> None:
    """Reserved by number: with a count, Docker gives the first one to every container."""
    seen = []
    for service in described("gpu.yaml").values():
        for device in (
            service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        ):
            assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
            assert service["deploy"]["replicas"] == 1
            seen += device["device_ids"]
    assert seen == ["0", "1"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # a busy machine starts seven processes
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
