"""What flags make: a configuration, which comes back as the same flags, or a refusal that names one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from eyas import configuration
from eyas.cluster.plan import gateway_argv, worker_argv
from eyas.common.config import (
    GPU_DEFAULTS,
    CertificateFiles,
    EngineConfig,
    GatewayConfig,
    ServeConfig,
    SpeculationConfig,
    WorkerConfig,
)
from eyas.common.errors import ConfigError
from eyas.common.security import api_keys
from eyas.common.types import Role
from eyas.engine.speculation.draft_worker.draft_runner import TreeExpansion
from tests.unit.command_line import parse


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: several have another usual layout."""
    monkeypatch.setattr(configuration, "visible", lambda: 1)


def test_defaults_are_those_of_the_dataclasses() -> None:
    args = parse("serve")
    gateway = configuration.gateway_config(args)
    assert gateway == ServeConfig().gateway == GatewayConfig(drain_s=5.0)
    assert configuration.serve_config(args, gateway) == ServeConfig()


def test_a_worker_command_line_comes_back_as_its_config() -> None:
    engine = EngineConfig(
        model="/models/m",
        draft="/models/h",
        speculative_token_map="/models/hot.pt",
        roles=(Role.DECODE,),
        worker="127.0.0.1:7001",
        load_format="dummy",
        threads=3,
        num_pages=5,
        pool_dir="/dev/shm/pools",
        context_length=77,
        max_running=6,
        max_waiting=8,
        chunk_tokens=7,
        lease_s=9,
        speculation=SpeculationConfig(steps=3, topk=2, draft_tokens=8),
    )
    worker = WorkerConfig(
        engine=engine,
        port=7001,
        metrics_port=7004,
        registry="rediss://h:6379/1",
        registry_ca="/redis.crt",
        tls_dir="/certs",
    )
    args = parse(*worker_argv(worker))
    assert configuration.worker_config(args) == worker and args.supervised
    plain = dataclasses.replace(
        worker,
        engine=dataclasses.replace(
            engine, draft=None, speculative_token_map=None, speculation=SpeculationConfig()
        ),
    )
    assert configuration.worker_config(parse(*worker_argv(plain))) == plain


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        (["--host", "10.0.0.2"], "10.0.0.2:7001"),
        (["--host", "0.0.0.0", "--advertise", "node-2"], "node-2:7001"),
        (["--host", "::", "--advertise", "fe80::2"], "[fe80::2]:7001"),
        (["--advertise", "node-2.lan:30001"], "node-2.lan:30001"),
    ],
)
def test_a_worker_is_named_after_the_address_that_reaches_it(flags: list[str], address: str) -> None:
    config = configuration.worker_config(parse("worker", "--port", "7001", *flags))
    assert config.address == config.engine.worker == address
    assert configuration.worker_config(parse(*worker_argv(config))) == config


def test_a_gateway_command_line_comes_back_as_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = GatewayConfig(
        host="0.0.0.0",
        port=1,
        grpc_port=2,
        registry="rediss://h:6379/1",
        registry_ca="/redis.crt",
        model="/m",
        served_model="x",
        api_keys=("k", "l"),
        certificate=CertificateFiles("/c.crt", "/c.key"),
        tls_dir="/certs",
        cors_origins=("https://a.example", "*"),
        allowed_hosts=("gateway", "chat.example"),
        tool_call_parser="hermes",
        chat_template="own.jinja",
        reasoning_parser="none",
        log_format="json",
        processes=3,
        member="/tmp/gateway-1.sock",
    )
    monkeypatch.setenv(api_keys.VARIABLE, api_keys.environment(gateway.api_keys)[api_keys.VARIABLE])
    args = parse(*gateway_argv(gateway))
    assert configuration.gateway_alone(args) == gateway


def test_only_the_embedded_model_has_the_embedded_head(tmp_path: Path) -> None:
    assert configuration.engine_config(parse("serve")).draft == EngineConfig().draft
    assert configuration.engine_config(parse("serve", "--draft", "none")).draft is None
    assert configuration.engine_config(parse("serve", "--model", str(tmp_path))).draft is None
    assert (
        configuration.gateway_config(parse("serve", "--model", str(tmp_path))).served_model == tmp_path.name
    )


def test_a_head_may_lie_in_its_models_folder(tmp_path: Path) -> None:
    asked = parse("serve", "--model", str(tmp_path), "--draft", "mtp")
    assert configuration.engine_config(asked).draft == str(tmp_path)


def test_a_gpu_serves_unified_by_default() -> None:
    assert configuration.serve_config(parse("serve", "--device", "cuda"), GatewayConfig()).layout == "unified"
    asked = parse("serve", "--device", "cuda", "--layout", "split")
    assert configuration.serve_config(asked, GatewayConfig()).layout == "split"


def test_auto_is_what_the_device_does_best() -> None:
    auto = ("--dtype", "auto", "--attention-backend", "auto", "--prefill-attention-backend", "auto")
    assert configuration.engine_config(parse("serve", *auto)) == EngineConfig()
    gpu = configuration.engine_config(parse("serve", "--device", "cuda:1", *auto))
    adaptive = dataclasses.replace(GPU_DEFAULTS.speculation, adaptive=True)
    assert gpu == dataclasses.replace(GPU_DEFAULTS, device="cuda:1", speculation=adaptive)
    assert (gpu.dtype, gpu.num_pages, gpu.overlap_schedule) == ("bfloat16", None, True)


def test_flags_by_the_names_of_another_server() -> None:
    theirs = {
        "--max-running-requests": "max_running",
        "--max-queued-requests": "max_waiting",
        "--max-waiting": "max_waiting",
        "--chunked-prefill-size": "chunk_tokens",
        "--cuda-graph-max-bs": "cuda_graph_max_bs",
        "--tensor-parallel-size": "tensor_parallel_size",
        "--tp": "tensor_parallel_size",
        "--context-length": "context_length",
    }
    for flag, field in theirs.items():
        found = configuration.engine_config(parse("serve", "--device", "cuda", flag, "17"))
        assert getattr(found, field) == 17
    for flag in ("--spec-adaptive", "--speculative-adaptive"):
        assert configuration.engine_config(parse("serve", flag)).speculation == SpeculationConfig(
            adaptive=True, open_depth=True
        )
    spec = ("--speculative-num-steps=3", "--speculative-eagle-topk=8", "--speculative-num-draft-tokens=32")
    assert configuration.engine_config(parse("serve", *spec)).speculation == SpeculationConfig(3, 8, 32)


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize(
    ("steps", "topk", "asked", "allowed"),
    [
        (5, 1, 5, "are 6"),
        (5, 1, 7, "are 6"),
        (3, 4, 38, "2 to 37"),
        (1, 4, 6, "2 to 5"),
        (3, 4, 1, "2 to 37"),
    ],
)
def test_a_round_of_another_width_than_asked_for_is_refused(
    command: str, steps: int, topk: int, asked: int, allowed: str
) -> None:
    args = parse(command, f"--spec-steps={steps}", f"--spec-topk={topk}", f"--spec-draft-tokens={asked}")
    with pytest.raises(ConfigError, match=f"--spec-draft-tokens: .*{allowed}") as refused:
        configuration.engine_config(args)
    assert refused.value.param == "spec-draft-tokens"


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "refusal"),
    [
        (33, 1, 34, "--spec-steps: 33 is more than 32"),
        (16, 17, 64, "--spec-topk: 17 is more than 16 with "),
        (2, 33, 64, "--spec-topk: 33 is more than 32 with "),
        (8, 32, 257, "--spec-draft-tokens: 257 is more than 256 with "),
    ],
)
def test_a_round_that_no_drafter_takes_is_refused(steps: int, topk: int, nodes: int, refusal: str) -> None:
    args = parse("serve", f"--spec-steps={steps}", f"--spec-topk={topk}", f"--spec-draft-tokens={nodes}")
    with pytest.raises(ConfigError, match=refusal):
        configuration.engine_config(args)


def test_the_widest_tree_has_every_candidate() -> None:
    """As many as its growth finds; and one less is a tree too."""
    growing = TreeExpansion(topk=4, draft_tokens=10**6)
    for level in range(3):
        rows = 1 if level == 0 else 4
        growing.grow([[1, 2, 3, 4]] * rows, [[0.4, 0.3, 0.2, 0.1]] * rows)
    most = 1 + len(growing.select())
    for asked in (2, most - 1, most):
        args = parse("serve", "--spec-steps=3", "--spec-topk=4", f"--spec-draft-tokens={asked}")
        assert configuration.engine_config(args).speculation == SpeculationConfig(3, 4, asked)


TREE = ["--spec-steps", "3", "--spec-topk", "8", "--spec-draft-tokens", "32"]


@pytest.mark.parametrize(
    ("flags", "largest", "batches"),
    [
        (["--draft", "none"], 256, ()),
        (["--max-running-requests", "48"], 48, ()),
        ([*TREE, "--no-spec-adaptive"], 32, ()),  # of 1,024 rows
        (TREE, 256, ()),  # as plain rounds
        (["--spec-steps", "3"], 256, ()),
        (["--cuda-graph-max-bs", "256"], 256, ()),
        (["--cuda-graph-max-bs", "100"], 100, ()),
        (["--cuda-graph-bs", "8", "1", "8", "2"], 8, (1, 2, 8)),
        (["--disable-cuda-graph"], 0, ()),
    ],
)
def test_batches_with_a_graph(flags: list[str], largest: int, batches: tuple[int, ...]) -> None:
    engine = configuration.engine_config(parse("serve", "--device", "cuda", *flags))
    assert (engine.cuda_graph_max_bs, engine.cuda_graph_bs) == (largest, batches)


def test_a_mixed_step_is_no_larger_than_one_of_prompts() -> None:
    engine = configuration.engine_config(parse("serve", "--device", "cuda", "--chunk-tokens", "100"))
    assert (engine.chunk_tokens, engine.mixed_tokens) == (100, 100)


def test_synthetic_acceptance_is_resolved_for_every_step() -> None:
    flags = ["--device", "cuda", "--spec-steps", "3", "--rejection-sample-method", "synthetic"]
    length = configuration.engine_config(parse("serve", *flags, "--synthetic-acceptance-length", "2.5"))
    assert length.speculation.synthetic_rates == (1.0, 0.5, 0.0)
    rates = configuration.engine_config(
        parse("serve", *flags, "--synthetic-acceptance-rates", "0.8", "0.4", "0.1")
    )
    assert rates.speculation.synthetic_rates == (0.8, 0.5, 0.25)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--cuda-graph-bs", "1", "8"],
        ["--disable-cuda-graph", "--disable-overlap-schedule"],
        ["--num-pages", "9", "--mem-fraction-static", "0.5", "--dtype", "float16", "--tp", "4"],
        ["--attention-backend", "torch"],
        ["--host-cache-gb", "2.5"],
        ["--no-spec-adaptive", "--spec-steps", "7"],
        ["--roles", "decode", "--spec-adaptive"],
        ["--draft-capture-layers", "2,16,29"],
        ["--prefill-attention-backend", "flashinfer"],
        ["--deterministic"],
        ["--spec-steps", "3", "--rejection-sample-method", "synthetic", "--synthetic-acceptance-length", "3"],
        ["--uniform-experts"],
        ["--registry", "redis://host:6379/0", "--cluster", "blue"],
    ],
)
def test_a_gpu_worker_command_line_comes_back_as_its_config(flags: list[str]) -> None:
    worker = configuration.worker_config(parse("worker", "--device", "cuda", *flags))
    assert configuration.worker_config(parse(*worker_argv(worker))) == worker


def test_an_exact_clusters_workers_have_one_number_of_gpus() -> None:
    flags = ("--device", "cuda", "--layout", "split", "--decode-tp", "2")
    configuration.own_config(parse("serve", *flags))
    with pytest.raises(ConfigError, match="--decode-tp: 2 is not --prefill-tp 1, as --deterministic asks"):
        configuration.own_config(parse("serve", *flags, "--deterministic"))
    both = configuration.own_config(parse("serve", *flags, "--prefill-tp", "2", "--deterministic"))
    assert both.engine.deterministic
