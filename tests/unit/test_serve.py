"""The supervisor: what it plans, how it holds a process, what it leaves behind (nothing)."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.cluster import child as child_module
from eyas.cluster.child import ChildProcess
from eyas.cluster.plan import HostResources, plan
from eyas.cluster.serve import LocalCluster
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig
from eyas.common.errors import ConfigError, DeadlineExceeded
from eyas.common.machine.folders import PREFIX, living_in, new_pool_folder
from eyas.common.security import api_keys
from eyas.common.types import Role

# --- plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["::", "::1"])
def test_an_ipv6_address_stands_in_brackets(host: str) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    ports = free_ports()
    gateway = GatewayConfig(host=host, port=next(ports), grpc_port=next(ports))
    cluster = LocalCluster(ServeConfig(gateway), lambda *_: None)
    assert (cluster.url, cluster.grpc_address) == (
        f"http://[::1]:{gateway.port}",
        f"[::1]:{gateway.grpc_port}",
    )


def test_port_0_is_any_free_port() -> None:
    """The launcher chooses it: what looks whether the cluster serves, and what is printed, must know it."""
    gateway = plan(
        ServeConfig(GatewayConfig(port=0, grpc_port=0)), itertools.count(7000), HostResources(2)
    ).gateway
    assert (gateway.port, gateway.grpc_port) == (7003, 7004)


def test_split_gives_every_tier_its_workers() -> None:
    made = plan(ServeConfig(prefill=2), itertools.count(7000), HostResources(9))
    roles = {name: worker.engine.roles for name, worker in made.workers.items()}
    assert roles == {
        "prefill-0": (Role.PREFILL,),
        "prefill-1": (Role.PREFILL,),
        "decode-0": (Role.DECODE,),
        "draft-0": (Role.DRAFT,),
    }
    assert {worker.engine.threads for worker in made.workers.values()} == {2}
    addresses = [worker.address for worker in made.workers.values()]
    assert len(set(addresses)) == 4
    assert [worker.engine.worker for worker in made.workers.values()] == addresses
    all_workers = "static:" + ",".join(addresses)
    assert {made.gateway.registry, *(worker.registry for worker in made.workers.values())} == {all_workers}


def test_no_draft_head_means_no_draft_worker() -> None:
    made = plan(ServeConfig(engine=EngineConfig(draft=None)), itertools.count(7000), HostResources(1))
    assert list(made.workers) == ["prefill-0", "decode-0"]
    assert {worker.engine.threads for worker in made.workers.values()} == {1}


def test_unified_workers_have_every_role() -> None:
    made = plan(ServeConfig(layout="unified"), itertools.count(7000), HostResources(4))
    assert {name: worker.engine.roles for name, worker in made.workers.items()} == {"worker-0": tuple(Role)}
    assert made.workers["worker-0"].engine.threads == 3, "a core stays free for the fronts"


# --- one process ---------------------------------------------------------------------------------------

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""
WITH_GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def until(what: Callable[[], object], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_log_lines_are_forwarded_and_the_code_is_told() -> None:
    lines: list[tuple[str, str]] = []
    child = ChildProcess(
        "one", python("print('hello'); raise SystemExit(3)"), lambda *line: lines.append(line)
    )
    child.start()
    assert await child.exited() == 3
    child.kill()
    assert lines == [("one", "hello")] and list(child.tail) == ["hello"]


async def test_a_process_has_the_environment_that_it_is_given() -> None:
    lines: list[tuple[str, str]] = []
    code = "import os; print(sorted(name for name in os.environ if name.startswith('EYAS')))"
    child = ChildProcess("one", python(code), lambda *line: lines.append(line), {"EYAS_TOLD": "1"})
    child.start()
    await child.exited()
    await until(lambda: lines)
    child.kill()
    assert lines == [("one", "['EYAS_TOLD']")]


async def test_only_the_gateway_is_handed_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str | None] = {}

    class NotStarted(ChildProcess):
        def start(self) -> None:
            assert self._env is not None and not any("sesame" in word for word in self.argv)
            told[self.name] = self._env.get(api_keys.VARIABLE)

    monkeypatch.setenv(api_keys.VARIABLE, "of a client")
    monkeypatch.setattr("eyas.cluster.serve.ChildProcess", NotStarted)
    monkeypatch.setattr("eyas.cluster.serve.START_S", 0.0)
    ports = free_ports()
    gateway = GatewayConfig(port=next(ports), grpc_port=next(ports), api_keys=("sesame", "open"))
    with pytest.raises(DeadlineExceeded):
        async with LocalCluster(ServeConfig(gateway), lambda *_: None):
            pass
    assert told == {"prefill-0": None, "decode-0": None, "draft-0": None, "gateway": "sesame\nopen"}


async def test_a_stubborn_process_is_killed_in_bounded_time() -> None:
    child = ChildProcess("stubborn", python(STUBBORN), lambda *_: None)
    child.start()
    await until(lambda: child.tail)
    began = time.monotonic()
    await child.stop(grace_s=0.3)
    assert child.returncode == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 20.0


async def test_a_process_that_cannot_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As while its program is replaced."""
    monkeypatch.setattr(child_module, "BACKOFF_S", (0.05,))
    said: list[str] = []
    program = tmp_path / "program"

    def install() -> None:
        program.write_text("#!/bin/sh\nexec sleep 60\n")
        program.chmod(0o700)

    install()
    child = ChildProcess("worker", (str(program),), lambda name, line: said.append(line))
    child.start()
    keeping = asyncio.create_task(child_module.keep(child, lambda name, line: said.append(line)))
    program.unlink()
    child.kill()
    refused = "cannot be started (No such file or directory); trying again in 0.05 s"
    await until(lambda: said.count(refused) > 1)
    install()
    await until(lambda: child.running)
    keeping.cancel()
    child.kill()


async def test_grandchildren_go_too() -> None:
    child = ChildProcess("parent", python(WITH_GRANDCHILD), lambda *_: None)
    child.start()
    await until(lambda: child.tail)
    grandchild = int(child.tail[0])
    await child.stop(grace_s=5)
    await until(lambda: not alive(grandchild))


SUPERVISED = """
import signal, time
from eyas.common.machine.processes import die_with_parent
die_with_parent(0.3)
if {deaf}: signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""
SUPERVISOR = """
import sys, time
from eyas.cluster.child import ChildProcess
child = ChildProcess("child", (sys.executable, "-c", sys.argv[1]), lambda *_: None)
child.start()
print(child.pid, flush=True)
while not child.tail: time.sleep(0.02)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_killed_supervisor_takes_its_children_along(deaf: bool) -> None:
    code = SUPERVISED.format(deaf=deaf)
    supervisor = subprocess.Popen([*python(SUPERVISOR), code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout
    with supervisor.stdout as lines:
        pid = int(lines.readline())
        assert lines.readline() == "up\n"
        supervisor.kill()
        supervisor.wait()
    await until(lambda: not alive(pid), timeout_s=5)


# --- a start that fails ------------------------------------------------------------------------------------

DOOMED = """
import sys
from eyas import cli
from eyas.cluster import serve

OTHERS = (
    "import signal, time\\n"
    "signal.signal(signal.SIGHUP, lambda *_: print('asked to leave', flush=True))\\n"
    "time.sleep(3)\\n"
    "print('up', flush=True)\\n"
    "time.sleep(60)\\n"
)

FAILS = "import time; time.sleep(3); exit('eyas: it has no such thing')"

class Doomed(serve.ChildProcess):
    def __init__(self, name, argv, *rest):
        code = FAILS if name == "decode-0" else OTHERS
        super().__init__(name, (sys.executable, "-c", code), *rest)

serve.ChildProcess = Doomed
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_ctrl_c_while_a_failed_start_is_cleared_away_keeps_its_error() -> None:
    ports = free_ports()
    command = [*python(DOOMED), "serve", f"--port={next(ports)}", f"--grpc-port={next(ports)}"]
    serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert serving.stderr
    while line := serving.stderr.readline():
        if "asked to leave" in line:  # which they do not: only the second wish of all ends them
            break
    began = time.monotonic()
    serving.send_signal(signal.SIGINT)
    rest = serving.stderr.read()
    assert serving.wait(timeout=10) == 2 and "decode-0 ended with code 1 at start: it has no" in rest, rest
    assert time.monotonic() - began < 5, "a Ctrl-C while it stops means: now"
    serving.stderr.close()


@pytest.mark.parametrize(("code", "error"), [(3, ConfigError), (0, asyncio.CancelledError)])
async def test_a_start_that_is_given_up_says_whether_it_had_failed(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException]
) -> None:
    """A process that a signal ended, or that left in order, may have been asked to by who gives it up."""
    children: list[ChildProcess] = []

    class Ending(ChildProcess):
        def __init__(self, name: str, argv: tuple[str, ...], *rest: object) -> None:
            ends = f"raise SystemExit({code})" if name == "decode-0" else "import time; time.sleep(60)"
            super().__init__(name, python(ends), *rest)  # type: ignore[arg-type]
            children.append(self)

    monkeypatch.setattr("eyas.cluster.serve.ChildProcess", Ending)
    monkeypatch.setattr("eyas.cluster.probe.ClusterProbe.serving", lambda *_: asyncio.sleep(60))
    ports = free_ports()
    gateway = GatewayConfig(port=next(ports), grpc_port=next(ports))
    starting = asyncio.create_task(LocalCluster(ServeConfig(gateway), lambda *_: None).__aenter__())
    await until(lambda: any(child.returncode == code for child in children))
    starting.cancel()
    with pytest.raises(error):
        await starting
    assert not any(child.running for child in children)


# --- pools ---------------------------------------------------------------------------------------------


def test_a_pool_folder_leaves_nothing(tmp_path: Path) -> None:
    pools = new_pool_folder(str(tmp_path))
    (pools.path / "pool").write_bytes(b"left by a worker that was killed")
    pools.leave()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_clusters_folder_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}dead").mkdir()
    (tmp_path / f"{PREFIX}dead" / "pool").write_bytes(b"old")
    living = new_pool_folder(str(tmp_path))
    another = new_pool_folder(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([living.path, another.path])
    living.leave()
    another.leave()
    assert os.listdir(tmp_path) == []


LIVING = """
import sys
from pathlib import Path
from eyas.common.machine.folders import living_in, new_pool_folder
if sys.argv[1] == "cluster":
    print(new_pool_folder(sys.argv[2]).path, flush=True)
    sys.stdin.read()
with living_in(Path(sys.argv[2])):
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
"""


def test_the_last_worker_of_a_killed_cluster_removes_its_folder(tmp_path: Path) -> None:
    def start(*args: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([*python(LIVING), *args], **pipes)  # type: ignore[call-overload]

    def told(process: subprocess.Popen[str]) -> str:
        assert process.stdout
        return process.stdout.readline().strip()

    cluster = start("cluster", str(tmp_path))
    folder = Path(told(cluster))
    workers = [start("worker", str(folder)) for _ in range(3)]
    assert [told(worker) for worker in workers] == ["in"] * 3

    def leave(worker: subprocess.Popen[str]) -> bool:
        worker.communicate("go\n", timeout=10)
        return folder.exists()

    assert leave(workers[0]), "the cluster lives"
    cluster.kill()
    cluster.communicate()
    assert leave(workers[1]), "a worker lives in it"
    assert not leave(workers[2])


def test_a_folder_that_is_no_clusters_stays(tmp_path: Path) -> None:
    with living_in(tmp_path):
        pass
    assert tmp_path.exists()
    with pytest.raises(ConfigError, match="--pool-dir: .*gone cannot be used"):
        with living_in(tmp_path / f"{PREFIX}gone"):
            pass
