"""Workers on GPUs of their own: who gets which one, how much of it, and what is refused before a start."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyas import cli, configuration
from eyas.cluster.plan import ClusterPlan, HostResources, WorkerGpus, places, plan, worker_argv
from eyas.cluster.serve import LocalCluster
from eyas.common.config import GatewayConfig, ServeConfig, WorkerConfig, resolve_engine
from eyas.common.errors import ConfigError
from eyas.common.types import Role
from eyas.engine.loading.build import build_engine
from tests.unit.loopback import QueueLink

H200 = 143771 << 20
FOUR = HostResources(9, (H200,) * 4)
HEAD = ("--draft", "head")
ON_GPUS = ("--device", "cuda", "--layout", "split")
SPLIT = ("--layout", "split", "--draft", "none")


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: several have another usual layout."""
    monkeypatch.setattr(configuration, "visible", lambda: 1)


def config(*flags: str) -> ServeConfig:
    args = cli._parser().parse_args(["serve", "--device", "cuda", *flags])
    return configuration.serve_config(args, GatewayConfig())


def planned(*flags: str, machine: HostResources = FOUR) -> ClusterPlan:
    return plan(config(*flags), itertools.count(7000), machine)


def where(*flags: str, machine: HostResources = FOUR) -> dict[str, tuple[str, float]]:
    workers = planned(*flags, machine=machine).workers
    return {name: (w.engine.device, w.engine.mem_fraction_static) for name, w in workers.items()}


# --- who gets which GPU --------------------------------------------------------------------------------


def test_workers_follow_each_other_on_the_gpus() -> None:
    assert where(*SPLIT, "--prefill", "1", "--decode", "2") == {
        "prefill-0": ("cuda:0", 0.88),
        "decode-0": ("cuda:1", 0.88),
        "decode-1": ("cuda:2", 0.88),
    }


def test_gpus_are_given_in_the_order_of_the_workers() -> None:
    flags = (*SPLIT, "--prefill", "2", "--gpus", "3,0,2")
    assert [device for device, _ in where(*flags).values()] == ["cuda:3", "cuda:0", "cuda:2"]
    assert list(where(*flags)) == ["prefill-0", "prefill-1", "decode-0"]


def test_workers_on_one_gpu_share_what_was_for_one() -> None:
    assert where(*SPLIT, "--decode", "2", "--gpus", "1,0,1", "--mem-fraction-static", "0.8") == {
        "prefill-0": ("cuda:1", 0.4),
        "decode-0": ("cuda:0", 0.8),
        "decode-1": ("cuda:1", 0.4),
    }


def test_a_gpu_that_decodes_drafts() -> None:
    """The draft role makes the gateway ask prefill for draft KV; no worker is there for drafts alone."""
    roles = {name: w.engine.roles for name, w in planned("--layout", "split", *HEAD).workers.items()}
    assert roles == {"prefill-0": (Role.PREFILL,), "decode-0": (Role.DECODE, Role.DRAFT)}
    assert {name: w.engine.roles for name, w in planned(*SPLIT).workers.items()} == {
        "prefill-0": (Role.PREFILL,),
        "decode-0": (Role.DECODE,),
    }


def test_a_gpu_that_decodes_leaves_drafting_to_draft_workers_if_there_are_any() -> None:
    made = planned("--layout", "split", "--decode", "2", "--draft-workers", "1", *HEAD).workers
    assert {name: (w.engine.device, w.engine.roles) for name, w in made.items()} == {
        "prefill-0": ("cuda:0", (Role.PREFILL,)),
        "decode-0": ("cuda:1", (Role.DECODE,)),
        "decode-1": ("cuda:2", (Role.DECODE,)),
        "draft-0": ("cuda:3", (Role.DRAFT,)),
    }


def test_unified_workers_on_gpus_of_their_own() -> None:
    made = planned("--workers", "2")
    assert {name: (w.engine.device, w.engine.roles) for name, w in made.workers.items()} == {
        "worker-0": ("cuda:0", tuple(Role)),
        "worker-1": ("cuda:1", tuple(Role)),
    }
    assert {w.engine.threads for w in made.workers.values()} == {4}


def test_whole_requests_need_no_host_memory_for_pages_that_travel() -> None:
    unified = planned("--workers", "2", "--transfer", "grpc").workers["worker-0"]
    assert unified.engine.transfer == "none" and "--transfer=none" in worker_argv(unified)
    assert planned(*SPLIT).workers["decode-0"].engine.transfer == "auto"
    assert planned(*SPLIT, "--transfer", "grpc").workers["decode-0"].engine.transfer == "grpc"
    args = cli._parser().parse_args(["serve", "--device", "cpu", "--layout", "unified"])
    made = plan(configuration.serve_config(args, GatewayConfig()), itertools.count(7000), FOUR)
    assert {w.engine.transfer for w in made.workers.values()} == {"auto"}


def test_workers_of_several_gpus_take_neighbours() -> None:
    two = ("--workers", "2", "--tp", "2")
    assert where(*two) == {"worker-0": ("cuda:0", 0.88), "worker-1": ("cuda:2", 0.88)}
    assert [device for device, _ in where(*two, "--gpus", "2,3,0,1").values()] == ["cuda:2", "cuda:0"]
    reserves = {"prefill-0": 4 << 30, "decode-0": 4 << 30}
    assert places({"prefill-0": 2, "decode-0": 1}, (1, 2, 2), 0.8, FOUR.gpus, reserves) == {
        "prefill-0": WorkerGpus("cuda:1", 0.4),
        "decode-0": WorkerGpus("cuda:2", 0.4),
    }


def test_a_named_device_is_the_first() -> None:
    made = where(*SPLIT, machine=FOUR)
    assert list(made.values()) == [("cuda:0", 0.88), ("cuda:1", 0.88)]
    args = cli._parser().parse_args(["serve", "--device", "cuda:2", "--tp", "2"])
    one = plan(configuration.serve_config(args, GatewayConfig()), itertools.count(7000), FOUR)
    assert [w.engine.device for w in one.workers.values()] == ["cuda:2"]


def test_a_cpus_workers_have_no_gpu() -> None:
    made = plan(ServeConfig(), itertools.count(7000), HostResources(4))
    assert {w.engine.device for w in made.workers.values()} == {"cpu"}


def test_a_workers_command_line_names_its_gpu() -> None:
    """So that a restart, which runs it again, gets the same one."""
    for worker in planned("--layout", "split", *HEAD, "--gpus", "1,1").workers.values():
        again = configuration.worker_config(cli._parser().parse_args(worker_argv(worker)))
        assert again == worker and isinstance(again, WorkerConfig)
        assert (again.engine.device, again.engine.mem_fraction_static) == ("cuda:1", 0.44)


def test_an_engine_works_on_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the current device, which would be GPU 0."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda", "cuda:1"):
        engine = resolve_engine(device, draft=None, model=str(tmp_path), pool_dir=str(tmp_path))
        with pytest.raises(ConfigError, match="config.json"):
            build_engine(engine, QueueLink(lambda event: None))
    assert chosen == [0, 1]


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--gpus", "0,4"), "--gpus: decode-0 would be on GPU 4, and this machine has 4, numbered from 0"),
        (("--decode", "4"), "--gpus: decode-3 would be on GPU 4, and this machine has 4"),
        (("--gpus", "0"), "--gpus: 1 named, 2 needed by prefill-0, decode-0"),
        (("--gpus", "0,1,2"), "--gpus: 3 named, 2 needed by prefill-0, decode-0"),
        (
            ("--gpus", "2,2", "--mem-fraction-static", "0.95"),
            "--mem-fraction-static: prefill-0, decode-0 share GPU 2: 0.95 of its 140.4 GiB, and 8 GiB more "
            "for the workers' graphs",
        ),
        (
            ("--gpus", "2,2", "--chunked-prefill-size", "16384", "--mem-fraction-static", "0.9"),
            "--mem-fraction-static: prefill-0, decode-0 share GPU 2: 0.9 of its 140.4 GiB, and 16 GiB more",
        ),
        (("--decode", "4", "--gpus", "0,0,0,0,0"), "--mem-fraction-static: prefill-0, decode-0, decode-1"),
    ],
)
def test_workers_that_do_not_fit_on_the_gpus_are_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(*SPLIT, *flags)
    assert says in refused.value.message and refused.value.param == says[2:].partition(":")[0]


def test_gpus_that_share_a_model_are_neighbours() -> None:
    for named in ("1,0", "0,0", "0,2"):
        with pytest.raises(ConfigError, match=f"worker-0 takes 2 GPUs that follow .*, and {named} do not"):
            planned("--tp", "2", "--gpus", named)


def test_a_gpu_of_unknown_size_may_be_shared() -> None:
    made = where(*SPLIT, "--gpus", "0,0", "--mem-fraction-static", "1", machine=HostResources(4, (None,)))
    assert set(made.values()) == {("cuda:0", 0.5)}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device", "cuda", "--decode", "2"), "--decode: needs --layout split, and this one is unified"),
        (("--workers", "2"), "--workers: needs --layout unified or auto, and this one is split"),
        (("--gpus", "0"), "--gpus: needs a GPU (--device cuda)"),
        (("--device", "cuda:1", "--gpus", "0"), "--gpus: --device cuda:1 names a GPU already"),
        (("--device", "cuda:one"), "--device: 'cuda:one' is neither cpu nor cuda"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: tuple[str, ...], says: str) -> None:
    args = cli._parser().parse_args(["serve", *flags])
    with pytest.raises(ConfigError) as refused:
        configuration.serve_config(args, GatewayConfig())
    assert says in refused.value.message
    assert refused.value.param == refused.value.message[2:].partition(":")[0]


@pytest.mark.parametrize("by", ["auto", "cuda_ipc", "shm", "tcp", "grpc"])
def test_pages_of_gpus_that_share_a_model_travel(by: str) -> None:
    assert config(*SPLIT, "--tp", "2", "--transfer", by).engine.transfer == by


def test_workers_of_one_role_may_have_unequal_numbers_of_gpus() -> None:
    made = plan(config(*SPLIT, "--tp", "2", "--decode-tp", "1"), itertools.count(7000), FOUR).workers.values()
    engines = [(w.engine.tensor_parallel_size, w.engine.device) for w in made]
    assert engines == [(2, "cuda:0"), (1, "cuda:2")]


# --- before anything starts ----------------------------------------------------------------------------

DRIVER = """#!/bin/sh
echo "0, GPU-aaaa, 143771"
echo "1, GPU-bbbb, 143771"
"""


def serve(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`eyas serve` where the only program is what `path` has."""
    command = [sys.executable, "-m", "eyas.cli", "serve", "--device=cuda", "--port=0", "--grpc-port=0"]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env["PATH"] = str(path)
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, env=env)


def scripted(path: Path, text: str) -> Path:
    driver = path / "nvidia-smi"
    driver.write_text(text)
    driver.chmod(0o755)
    return path


def test_a_machine_without_gpus_says_so_in_one_sentence(tmp_path: Path) -> None:
    done = serve(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    said = "eyas: --device: there is no GPU here: nvidia-smi, which comes with its driver, cannot be run\n"
    assert done.stderr == said


def test_gpus_that_are_not_there_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    done = serve(scripted(tmp_path, DRIVER), *SPLIT, "--decode", "2")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "--gpus: decode-1 would be on GPU 2, and this machine has 2" in done.stderr


def test_the_supervisor_asks_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(scripted(tmp_path, DRIVER)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = resolve_engine("cuda", draft=None)
    gateway = GatewayConfig(port=0, grpc_port=0)
    for workers in (1, 2):
        LocalCluster(ServeConfig(gateway, engine, "unified", workers=workers), lambda *_: None)
    with pytest.raises(ConfigError, match="--gpus: worker-2 would be on GPU 2"):
        LocalCluster(ServeConfig(gateway, engine, "unified", workers=3), lambda *_: None)
