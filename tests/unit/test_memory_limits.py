"""What memory there is: the host's or a container's, by control groups of both versions; who asks more."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import psutil
import pytest

from eyas.bench import fits
from eyas.cluster import serve
from eyas.cluster.plan import HostResources, plan
from eyas.cluster.serve import LocalCluster
from eyas.common.config import EngineConfig, ServeConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.memory import GIB, MemoryBudget, memory, uncollected
from eyas.engine.loading import host_cache

MIB = 2**20


def write(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(folder: str, most: str | int, now: int, inactive: int = 0, active: int = 0) -> dict[str, str | int]:
    stat = f"anon 1\ninactive_file {inactive}\nactive_file {active}\nslab 2"
    at = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {f"{at}/memory.max": most, f"{at}/memory.current": now, f"{at}/memory.stat": stat}


def v1(folder: str, most: int, now: int, inactive: int = 0) -> dict[str, str | int]:
    at = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    names = f"{at}/memory.limit_in_bytes", f"{at}/memory.usage_in_bytes", f"{at}/memory.stat"
    return dict(zip(names, (most, now, f"inactive_file 5\ntotal_inactive_file {inactive}"), strict=True))


CGROUP = "proc/self/cgroup"
LIMITED = [
    ({CGROUP: "0::/"} | v2("", 64 * MIB, 24 * MIB), 40),
    ({CGROUP: "0::/"} | v2("", 64 * MIB, 24 * MIB, inactive=4 * MIB), 44),
    ({CGROUP: "0::/"} | v2("", 64 * MIB, 24 * MIB, inactive=4 * MIB, active=3 * MIB), 47),
    ({CGROUP: "0::/a/b"} | v2("a/b", "max", 8 * MIB) | v2("a", 64 * MIB, 24 * MIB), 40),
    ({CGROUP: "0::/a/b"} | v2("a/b", 60 * MIB, 24 * MIB) | v2("a", 64 * MIB, 24 * MIB), 36),
    ({CGROUP: "0::/docker/x"} | v2("", 64 * MIB, 24 * MIB), 40),  # the path is the host's
    ({CGROUP: "3:cpu:/\n2:memory:/docker/x\n0::/"} | v1("docker/x", 64 * MIB, 24 * MIB, 4 * MIB), 44),
    ({CGROUP: "2:memory:/docker/x"} | v1("", 64 * MIB, 24 * MIB), 40),
    ({CGROUP: "2:memory:/x"} | v1("x", 2**63 - 4096, 24 * MIB) | v1("", 64 * MIB, 24 * MIB), 40),
    ({CGROUP: "0::/"} | v2("", 64 * MIB, 80 * MIB), 0),
]
FREE = [
    {},
    {CGROUP: "0::/"} | v2("", "max", 24 * MIB),
    {CGROUP: "2:memory:/x"} | v1("x", 2**63 - 4096, 24 * MIB),
    {CGROUP: "3:cpu:/\n1:name=systemd:/"} | v2("", 64 * MIB, 24 * MIB),
    {CGROUP: "0::/", "sys/fs/cgroup/memory.max": 64 * MIB},
]


@pytest.mark.parametrize(("files", "mib"), LIMITED)
def test_the_nearest_limit_of_the_own_group_and_those_above_it_counts(
    files: dict[str, str | int], mib: int, tmp_path: Path
) -> None:
    found = memory(write(tmp_path, files))
    assert (found.free, found.holder) == (mib * MIB, "container") and found.total <= 64 * MIB


@pytest.mark.parametrize("files", FREE)
def test_without_a_limit_it_is_the_hosts(files: dict[str, str | int], tmp_path: Path) -> None:
    found = memory(write(tmp_path, files))
    assert found.holder == "host" and found.total == psutil.virtual_memory().total


def test_this_machine_has_some() -> None:
    found = memory()
    assert 0 < found.free <= found.total


# --- who asks --------------------------------------------------------------------------------------------

SMALL = MemoryBudget(16 * GIB, 10 * GIB, "container")


def asked(each: float, **shape: object) -> ServeConfig:
    return dataclasses.replace(ServeConfig(engine=EngineConfig(host_cache_gb=each)), **shape)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (asked(6, layout="split"), "6 GiB for each of 2 workers are 12 GiB"),
        (asked(6, layout="auto", workers=2), "6 GiB for each of 2 workers are 12 GiB"),
        (asked(3, layout="split", prefill=2, decode=2), "3 GiB for each of 4 workers are 12 GiB"),
        (asked(11, layout="unified", workers=1), "11 GiB asked for"),
        (asked(5, layout="split"), ""),  # the draft worker has none
        (asked(0, layout="split"), ""),
    ],
)
def test_the_workers_of_one_command_share_the_memory(config: ServeConfig, refused: str) -> None:
    machine = HostResources(4, memory=SMALL)
    if not refused:
        plan(config, iter(range(7001, 7100)), machine)
        return
    with pytest.raises(ConfigError) as found:
        plan(config, iter(range(7001, 7100)), machine)
    message = found.value.message
    assert message.startswith(f"--host-cache-gb: {refused}, and the container has 10.0 GiB available")
    assert found.value.param == "host-cache-gb" and "ask for at most" in message


def test_a_cluster_asks_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "memory", lambda: SMALL)
    config = asked(6, layout="split")
    config = dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, port=0, grpc_port=0))
    with pytest.raises(ConfigError, match="--host-cache-gb: 6 GiB for each of 2 workers are 12 GiB"):
        LocalCluster(config, lambda name, line: None)


def test_an_engine_asks_for_the_containers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "memory", lambda: SMALL)
    with pytest.raises(ConfigError, match="11 GiB asked for, and the container has 10.0 GiB available"):
        host_cache.check_host_cache(EngineConfig(host_cache_gb=11))
    host_cache.check_host_cache(EngineConfig(host_cache_gb=9))


def test_benchmarks_ask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "memory", lambda: SMALL)
    assert fits.free_bytes("cpu") == 10 * GIB


def test_what_imports_make_is_never_searched() -> None:
    with uncollected():
        assert not gc.isenabled()
        made = [list[int]() for _ in range(1000)]
    try:
        assert gc.isenabled() and gc.get_freeze_count() > len(made)
    finally:
        gc.unfreeze()
