"""The images of docker/ built, and its compose file run in containers: `make containers`.

Builds the CPU image, starts Redis, gateway, prefill, decode and draft, and lets chats run while decode is
scaled to two and containers are killed; every text is compared with what it was before. Then the same behind
TLS and keys (secure.yaml), and the end: nothing is left. Needs root; `container_engine` has the engine, and
knows how it gets along on a machine that forbids part of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.container_engine import IMAGE, USER, Engine, problem

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
PORT, GRPC_PORT = 18000, 18001
NETWORK = "eyas_default"
START_S, END_S = 300.0, 120.0
STREAMS, TOKENS = 6, 160


@dataclass
class Log:
    """What was done, and how long it took; printed as it happens."""

    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.say(f"{what}: {time.monotonic() - began:.1f} s")


# --- callers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Door:
    """The gateway as callers see it: its address, what they trust, and their key."""

    client: httpx.Client
    url: str

    def stream(self, seed: int, on_token: Callable[[], None] = lambda: None) -> str:
        """The text of one seeded chat, which `on_token` hears growing."""
        body = {
            "model": "eyas-nano",
            "messages": [{"role": "user", "content": f"Number {seed * 137}: count to ten."}],
            "max_tokens": TOKENS,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
        }
        text = ""
        with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read().decode()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(c["delta"].get("content") or "" for c in event["choices"])
                    on_token()
        return text

    def workers(self) -> dict[str, int]:
        """How many workers of each kind serve, as the gateway sees them."""
        with contextlib.suppress(httpx.HTTPError):
            reply = self.client.get(f"{self.url}/cluster")
            if reply.status_code == 200:
                kinds = [tuple(w["roles"]) for w in reply.json()["workers"] if w["serving"]]
                return {"+".join(kind): kinds.count(kind) for kind in kinds}
        return {}

    def streams(self, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        """All seeded chats at once; `meanwhile` runs when each has a token."""
        begun: set[int] = set()
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            running = [pool.submit(self.stream, n, lambda n=n: begun.add(n)) for n in range(STREAMS)]
            wait_until(lambda: len(begun) == STREAMS or any(r.done() for r in running), "streams begin")
            meanwhile()
            return [each.result() for each in running]


def wait_until(true: Callable[[], bool], what: str, seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.3)


# --- the cluster ---------------------------------------------------------------------------------------


@dataclass
class Compose:
    """A project of podman-compose: its files, and the variables that they read."""

    engine: Engine
    files: tuple[str, ...]
    variables: dict[str, str]

    def run(self, *words: str, limit_s: float = START_S) -> str:
        named = [word for name in self.files for word in ("-f", str(DOCKER / name))]
        command = [*self.engine.compose, *named, *words]
        ports = {"EYAS_PORT": str(PORT), "EYAS_GRPC_PORT": str(GRPC_PORT)}
        environment = self.engine.environment | ports | self.variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def up(self, decodes: int) -> None:
        self.run("up", "-d", "--no-build", "--scale", "prefill=1", "--scale", f"decode={decodes}")

    def containers(self) -> list[str]:
        return self.engine.podman("ps", "--format", "{{.Names}}").split()

    def healthy(self) -> bool:
        """Whether each container's own health check succeeds."""
        names = [name for name in self.containers() if name != "eyas-init"]
        return bool(names) and all(self.engine.succeeds("healthcheck", "run", name) for name in names)


def ready(compose: Compose, door: Door, decodes: int) -> None:
    wanted = {"prefill": 1, "decode": decodes, "draft": 1}
    try:
        wait_until(lambda: door.workers() == wanted, f"workers {wanted}")
        wait_until(compose.healthy, "health checks succeed")
    except AssertionError as error:
        for name in compose.containers():
            print(f"--- {name}\n{compose.engine.said(name)}", file=sys.stderr)
        raise AssertionError(f"{error}; the gateway has {door.workers()}") from None


def plain(engine: Engine, log: Log) -> None:
    """The cluster of compose.yaml: chats, two decode workers, killed containers."""
    compose = Compose(engine, ("compose.yaml", "podman.yaml"), {})
    with ended(compose, log), httpx.Client(timeout=END_S, trust_env=False) as client:
        door = Door(client, f"http://127.0.0.1:{PORT}")
        with log.timed("compose up, one decode worker, until every health check succeeds"):
            compose.up(1)
            ready(compose, door, 1)
        with log.timed(f"{STREAMS} streamed chats of {TOKENS} tokens at once"):
            expected = door.streams()
        with log.timed("decode scaled to two"):
            compose.up(2)
            ready(compose, door, 2)
        assert door.streams() == expected
        log.say("the same chats: the same texts")
        users = {
            engine.podman("exec", name, "id", "-u").strip()
            for name in compose.containers()
            if "redis" not in name
        }
        assert users == {USER}, users
        log.say(f"every process of Eyas runs as user {USER}")
        for name in ("eyas_decode_1", "eyas_prefill_1", "eyas_draft_1", "eyas_redis_1"):
            killed(compose, door, name, expected, log)


def killed(compose: Compose, door: Door, name: str, expected: list[str], log: Log) -> None:
    """Kills a container while chats stream: no text differs, and it is started again."""
    began = time.monotonic()

    def kill() -> None:
        os.kill(int(compose.engine.podman("inspect", "--format", "{{.State.Pid}}", name)), signal.SIGKILL)

    before = compose.engine.started(name)
    texts = door.streams(meanwhile=kill)
    wrong = sum(text != right for text, right in zip(texts, expected, strict=True))
    assert not wrong, f"{name} killed: {wrong} of {STREAMS} texts differ"
    wait_until(lambda: compose.engine.started(name) != before, f"{name} is started again")
    ready(compose, door, 2)
    log.say(
        f"{name} killed in mid-stream: no text differs; started again by its policy, "
        f"ready after {time.monotonic() - began:.1f} s"
    )


def secure(engine: Engine, folder: Path, log: Log) -> None:
    """secure.yaml over it: TLS, mutual TLS between the services, keys."""
    certs = folder / "certs"
    shutil.rmtree(certs, ignore_errors=True)
    eyas("certs", str(certs), "--names", "localhost")
    key = eyas("keys", "add", str(certs / "keys"), "alice").split()[-1]
    (certs / "ca.key").rename(folder / "ca.key")  # which no service needs
    for path in (certs, *certs.rglob("*")):
        os.chown(path, int(USER), int(USER))
    compose = Compose(engine, ("compose.yaml", "podman.yaml", "secure.yaml"), {"EYAS_CERTS": str(certs)})
    headers, url = {"Authorization": f"Bearer {key}"}, f"https://localhost:{PORT}"
    trusted = httpx.Client(verify=str(certs / "ca.crt"), headers=headers, timeout=END_S, trust_env=False)
    with ended(compose, log), trusted as client:
        with log.timed("secure.yaml: compose up, until every health check succeeds"):
            compose.up(1)
            ready(compose, Door(client, url), 1)
        Door(client, url).streams()
        refused = client.get(f"{url}/v1/models", headers={"Authorization": "Bearer wrong"}).status_code
        assert refused == 401, refused
        log.say("chats by HTTPS with a key; a wrong key: 401")


def eyas(*words: str) -> str:
    """What a command says."""
    command = [sys.executable, "-m", "eyas.cli", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def ended(compose: Compose, log: Log) -> Iterator[None]:
    """Afterwards `compose down`, and nothing is left."""
    try:
        yield
    finally:
        began = time.monotonic()
        compose.run("down", "--volumes")
        compose.engine.forget_names(NETWORK)
        left = compose.engine.podman("ps", "--all", "--format", "{{.Names}}").split()
        log.say(f"compose down: {time.monotonic() - began:.1f} s, containers left: {left or 'none'}")
    assert not left, left


def images(engine: Engine, log: Log) -> None:
    """The CPU image, and once more with a changed source."""
    with log.timed("base image"):
        engine.make_base()
    with log.timed(f"{IMAGE} built (layers of an earlier build are used)"):
        engine.build(ROOT)
    with engine.changed_copy(ROOT) as changed, log.timed("built again with a changed source"):
        engine.build(changed)
    engine.build(ROOT)
    log.say(f"{IMAGE}: {engine.podman('image', 'inspect', '--format', '{{.Size}}', IMAGE).strip()} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make containers", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/eyas-containers"), help="images, layers, certificates"
    )
    parser.add_argument("--only", choices=["images", "plain", "secure"], help="one part")
    args = parser.parse_args()
    if why := problem():
        print(why, file=sys.stderr)
        return 2
    engine, log = Engine(args.folder), Log()
    for line in engine.does_without:
        log.say(line)
    parts: dict[str, Callable[[], None]] = {
        "images": lambda: images(engine, log),
        "plain": lambda: plain(engine, log),
        "secure": lambda: secure(engine, args.folder, log),
    }
    for name, part in parts.items():
        if args.only in (None, name):
            part()
    log.say("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
