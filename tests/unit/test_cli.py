"""The command line: quick help, one line for what cannot work, and flags that come back as they went."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas import cli
from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig, SpeculationConfig, WorkerConfig
from eyas.common.types import Role
from eyas.worker.plan import gateway_argv, worker_argv


def eyas(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eyas.cli", *args], capture_output=True, text=True, timeout=60
    )


def test_help_is_quick() -> None:
    fastest = 10.0
    for _ in range(3):
        began = time.monotonic()
        assert eyas("--help").returncode == 0
        fastest = min(fastest, time.monotonic() - began)
    assert fastest < 0.5


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "eighty"], "'eighty' is not a port"),
        (["serve", "--decode", "0"], "'0' is not a positive number"),
        (["serve", "--layout", "diagonal"], "diagonal"),
        (["worker", "--roles", "chef"], "'chef' is not a list of prefill, decode, draft"),
        (["serve", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["worker", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["gateway", "--registry", "static:", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["gateway"], "--registry"),
        (["worker", "--registry", "static:a:1"], "registry must be redis://host:port/db"),
        (["gateway", "--registry", "etcd:"], "registry must start with 'static:' or 'redis://'"),
        (["bench", "bs0"], "'bs0'"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_work_ends_in_one_line(args: list[str], says: str) -> None:
    done = eyas(*args)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1 and says in done.stderr, done.stderr
    assert done.stdout == ""


def test_version() -> None:
    assert eyas("--version").stdout.startswith("eyas ")


def parse(*args: str) -> cli.argparse.Namespace:
    return cli._parser().parse_args(args)


def test_defaults_are_those_of_the_dataclasses() -> None:
    args = parse("serve")
    gateway = cli.gateway_config(args)
    assert gateway == GatewayConfig()
    assert cli.serve_config(args, gateway) == ServeConfig()


def test_a_worker_command_line_comes_back_as_its_config() -> None:
    engine = EngineConfig(
        model="/models/m",
        draft="/models/h",
        roles=(Role.DECODE,),
        worker="127.0.0.1:7001",
        load_format="dummy",
        threads=3,
        num_pages=5,
        pool_dir="/dev/shm/pools",
        max_running=6,
        chunk_tokens=7,
        lease_s=9,
        speculation=SpeculationConfig(steps=3, topk=2, draft_tokens=8),
        draft_workers=("127.0.0.1:7002", "127.0.0.1:7003"),
    )
    worker = WorkerConfig(engine=engine, port=7001, metrics_port=7004, registry="redis://h:6379/1")
    args = parse(*worker_argv(worker))
    assert cli.worker_config(args) == worker and args.supervised
    plain = dataclasses.replace(worker, engine=dataclasses.replace(engine, draft=None, draft_workers=()))
    assert cli.worker_config(parse(*worker_argv(plain))) == plain


def test_a_gateway_command_line_comes_back_as_its_config() -> None:
    gateway = GatewayConfig(
        host="0.0.0.0",
        port=1,
        grpc_port=2,
        registry="static:a:1,b:2",
        model="/m",
        served_model="x",
        api_key="k",
        cors_origins=("https://a.example", "*"),
        log_format="json",
    )
    args = parse(*gateway_argv(gateway))
    assert cli.gateway_config(args, args.registry) == gateway


def test_only_the_embedded_model_has_the_embedded_head(tmp_path: Path) -> None:
    assert cli.engine_config(parse("serve")).draft == EngineConfig().draft
    assert cli.engine_config(parse("serve", "--draft", "none")).draft is None
    assert cli.engine_config(parse("serve", "--model", str(tmp_path))).draft is None
    assert cli.gateway_config(parse("serve", "--model", str(tmp_path))).served_model == tmp_path.name


def test_a_gpu_serves_unified_by_default() -> None:
    assert cli.serve_config(parse("serve", "--device", "cuda"), GatewayConfig()).layout == "unified"
    asked = parse("serve", "--device", "cuda", "--layout", "split")
    assert cli.serve_config(asked, GatewayConfig()).layout == "split"
