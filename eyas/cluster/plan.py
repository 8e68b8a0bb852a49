"""The processes of a local cluster, and the command line of each.

Every process gets all addresses, and a worker its GPU. So a restarted worker is where it was. It starts
nothing and asks the system nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from eyas.common.cluster.names import CLUSTER
from eyas.common.config import (
    AdapterConfig,
    EngineConfig,
    GatewayConfig,
    ServeConfig,
    SpeculationConfig,
    WorkerConfig,
)
from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.common.machine.memory import MemoryBudget
from eyas.common.security.secret_urls import as_flag
from eyas.common.types import Role
from kv_transfer.backends.table import NONE


@dataclass(frozen=True)
class WorkerGpus:
    """A worker's first GPU, "cuda:1" for instance, and the fraction of the memory of each of its GPUs."""

    device: str
    fraction: float


def places(
    ranks: Mapping[str, int],
    numbers: Sequence[int],
    fraction: float,
    memory: Sequence[int | None],
    reserves: Mapping[str, int],
) -> dict[str, WorkerGpus]:
    """A place for each worker. Workers whose GPU is named several times share it, in equal fractions.

    `ranks`: how many GPUs each worker takes; `numbers`: those GPUs, worker after worker. `fraction`: of a
    GPU's memory, for all workers there together. `memory`: bytes of every GPU of the machine, by number;
    None: unknown. `reserves`: bytes that each worker takes beside its fraction. Raises ConfigError, which
    names the flag, if that does not fit.
    """
    _check_count(ranks, numbers)
    left = iter(numbers)
    own = {name: tuple(itertools.islice(left, count)) for name, count in ranks.items()}
    sharers: dict[int, list[str]] = defaultdict(list)
    for name, gpus in own.items():
        _check_gpus(name, gpus, len(memory))
        for gpu in gpus:
            sharers[gpu].append(name)
    for gpu, names in sharers.items():
        _check_shares(gpu, {name: reserves[name] for name in names}, fraction, memory[gpu])
    return {
        name: WorkerGpus(f"cuda:{gpus[0]}", fraction / max(len(sharers[gpu]) for gpu in gpus))
        for name, gpus in own.items()
    }


def _check_count(ranks: Mapping[str, int], numbers: Sequence[int]) -> None:
    needed = sum(ranks.values())
    if len(numbers) != needed:
        text = f"{len(numbers)} named, {needed} needed by {', '.join(ranks)}"
        raise ConfigError(f"--gpus: {text}", param="gpus")


def _check_gpus(name: str, gpus: Sequence[int], there: int) -> None:
    for gpu in gpus:
        if gpu >= there:
            text = f"{name} would be on GPU {gpu}, and this machine has {there}, numbered from 0"
            raise ConfigError(f"--gpus: {text}; a GPU named twice is shared (--gpus 0,0)", param="gpus")
    if list(gpus) != list(range(gpus[0], gpus[0] + len(gpus))):
        text = f"{name} takes {len(gpus)} GPUs that follow each other, and {','.join(map(str, gpus))} do not"
        raise ConfigError(f"--gpus: {text}", param="gpus")


def _check_shares(gpu: int, reserves: Mapping[str, int], fraction: float, memory: int | None) -> None:
    """A worker alone on a GPU makes do with what is free; several would each take what is free now."""
    reserve = sum(reserves.values())
    if memory is None or len(reserves) == 1 or fraction * memory + reserve <= memory:
        return
    raise ConfigError(
        f"--mem-fraction-static: {', '.join(reserves)} share GPU {gpu}: {fraction:g} of its "
        f"{memory / 2**30:.1f} GiB, and {reserve / 2**30:g} GiB more for the workers' graphs and "
        "activations, are more than it has; lower the fraction or name the GPU less often",
        param="mem-fraction-static",
    )


@dataclasses.dataclass(frozen=True)
class HostResources:
    """The resources of a cluster: cores, bytes of each GPU by number (None: unknown), bytes of memory."""

    cores: int
    gpus: tuple[int | None, ...] = ()
    memory: MemoryBudget | None = None  # None: unknown


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """The processes of a cluster: workers by name, and the gateway that routes to all of them."""

    workers: dict[str, WorkerConfig]
    gateway: GatewayConfig


def plan(config: ServeConfig, ports: Iterator[int], machine: HostResources) -> ClusterPlan:
    """The processes for `config`. CPU engines, and each one's attention ranks, share all cores but one, with
    at least one thread each. `ports`: free ones, of workers, and of a gateway whose ports are 0.

    One core per gateway process stays free, for the fronts too: an engine with more threads than free cores
    waits at every barrier for the thread without a core (8 times slower on two cores). Raises ConfigError if
    the workers do not fit on the GPUs, or their host caches into the memory.
    """
    engines = {"unified": _unified, "split": _split, "auto": _auto}[config.layout](config)
    _check_host_caches([engine.host_cache_gb for engine in engines.values()], machine.memory)
    if config.engine.device != "cpu":
        engines = _on_gpus(config, engines, machine.gpus)
    processes = sum(engine.dp_attention for engine in engines.values())
    threads = max(1, (machine.cores - config.gateway.processes) // processes)
    workers = {
        name: _worker(dataclasses.replace(engine, threads=threads), next(ports))
        for name, engine in engines.items()
    }
    registry = "static:" + ",".join(worker.address for worker in workers.values())
    tls_dir = config.gateway.tls_dir  # one folder serves all: certificates have no addresses in them
    workers = {
        name: dataclasses.replace(
            worker,
            registry=registry,
            tls_dir=tls_dir,
            adapters=config.adapters if worker.engine.max_loras else AdapterConfig(),
        )
        for name, worker in workers.items()
    }
    layout = "auto" if config.layout == "auto" else "static"
    gateway = dataclasses.replace(
        config.gateway,
        port=config.gateway.port or next(ports),
        grpc_port=config.gateway.grpc_port or next(ports),
        registry=registry,
        layout=layout,
    )
    return ClusterPlan(workers, gateway)


def _unified(config: ServeConfig) -> dict[str, EngineConfig]:
    """Every worker takes whole requests: a GPU's spares itself the host memory through which pages travel."""
    engine = dataclasses.replace(config.engine, roles=tuple(Role))
    if engine.device != "cpu":
        engine = dataclasses.replace(engine, transfer=NONE)
    return _tier("worker", config.workers, engine)


def _auto(config: ServeConfig) -> dict[str, EngineConfig]:
    """Unified workers that compute prompts for each other: their pages travel."""
    return _tier("worker", config.workers, dataclasses.replace(config.engine, roles=tuple(Role)))


def _split(config: ServeConfig) -> dict[str, EngineConfig]:
    """Prefill, decode and draft workers. Without draft workers a GPU drafts where it decodes."""
    on_gpus = config.engine.device != "cpu"
    draft_workers = int(not on_gpus) if config.draft_workers is None else config.draft_workers
    elsewhere = draft_workers if config.engine.draft else 0
    here = (Role.DRAFT,) if on_gpus and config.engine.draft and not elsewhere else ()

    def engine(*roles: Role, ranks: int = 1) -> EngineConfig:
        return dataclasses.replace(config.engine, roles=roles, tensor_parallel_size=ranks)

    return (
        _tier(Role.PREFILL, config.prefill, engine(Role.PREFILL, ranks=config.prefill_tp))
        | _tier(Role.DECODE, config.decode, engine(Role.DECODE, *here, ranks=config.decode_tp))
        | _tier(Role.DRAFT, elsewhere, dataclasses.replace(engine(Role.DRAFT), **_OF_DRAFT_WORKERS))
    )


_OF_DRAFT_WORKERS: dict[str, Any] = {
    "host_cache_gb": 0.0,
    "disk_cache_dir": None,
    "kv_store": None,
    "dp_attention": 1,
    "expert_replicas": 0,
    "max_loras": 0,
}
"""They have no prefix cache, no attention ranks, and no adapters: what they draft, others verify."""


def _check_host_caches(requested: list[float], memory: MemoryBudget | None) -> None:
    """Each in GiB: together they take the memory of one machine."""
    caches = [each for each in requested if each]
    if memory is None or sum(caches) <= memory.free_gib:
        return
    demand = f"{caches[0]:g} GiB asked for"
    if len(caches) > 1:
        demand = f"{caches[0]:g} GiB for each of {len(caches)} workers are {sum(caches):g} GiB"
    most = math.floor(10 * memory.free_gib / len(caches)) / 10
    has = f"the {memory.holder} has {memory.free_gib:.1f} GiB available"
    advice = f"ask for at most {most:g}, or start fewer workers"
    raise ConfigError(f"--host-cache-gb: {demand}, and {has}: {advice}", param="host-cache-gb")


def _tier(name: str, count: int, engine: EngineConfig) -> dict[str, EngineConfig]:
    return {f"{name}-{i}": engine for i in range(count)}


def _on_gpus(
    config: ServeConfig, engines: dict[str, EngineConfig], memory: tuple[int | None, ...]
) -> dict[str, EngineConfig]:
    """The engines with their GPUs: those that `config` names, else one after the other."""
    ranks = {name: engine.device_ranks for name, engine in engines.items()}
    first = number_of(config.engine.device)
    numbers = config.gpus or tuple(range(first, first + sum(ranks.values())))
    reserves = {name: engine.reserve_bytes for name, engine in engines.items()}
    placed = places(ranks, numbers, config.engine.mem_fraction_static, memory, reserves)
    return {
        name: dataclasses.replace(
            engine, device=placed[name].device, mem_fraction_static=placed[name].fraction
        )
        for name, engine in engines.items()
    }


def _worker(engine: EngineConfig, port: int) -> WorkerConfig:
    worker = WorkerConfig(port=port)
    return dataclasses.replace(worker, engine=dataclasses.replace(engine, worker=worker.address))


def worker_argv(worker: WorkerConfig) -> tuple[str, ...]:
    """The command line of `worker`. `eyas.cli` parses it to an equal config.

    (Synthetic rates are equal up to rounding, because the flags take their products. Addresses with a
    password are passed in the environment.)
    """
    flags: dict[str, object] = {
        "roles": ",".join(worker.engine.roles),
        "host": worker.host,
        "port": worker.port,
        "metrics-port": worker.metrics_port,
        **as_flag("registry", worker.registry),
        "drain-s": f"{worker.drain_s:g}",
        **_engine_flags(worker.engine),
        **_graph_flags(worker.engine),
        **_speculation_flags(worker.engine),
    }
    if worker.cluster != CLUSTER:
        flags["cluster"] = worker.cluster
    if worker.registry_ca is not None:
        flags["registry-ca"] = worker.registry_ca
    if worker.tls_dir is not None:
        flags["tls-dir"] = worker.tls_dir
    if worker.advertise:
        flags["advertise"] = worker.advertise
    if worker.adapters.loras:
        flags["lora"] = tuple(f"{name}={folder}" for name, folder in worker.adapters.loras)
    if worker.adapters.dirs:
        flags["lora-dir"] = worker.adapters.dirs
    return ("worker", *_command_line(flags), "--supervised")


def _engine_flags(engine: EngineConfig) -> dict[str, object]:
    flags: dict[str, object] = {
        "model": engine.model,
        "draft": engine.draft or _lookup(engine.speculation),
        "device": engine.device,
        "tensor-parallel-size": engine.tensor_parallel_size,
        "dp-attention": engine.dp_attention,
        "expert-replicas": engine.expert_replicas,
        "load-format": engine.load_format,
        "model-impl": engine.model_impl,
        "dtype": engine.dtype,
        "kv-cache-dtype": engine.kv_cache_dtype,
        "attention-backend": engine.attention_backend,
        "prefill-attention-backend": engine.prefill_attention_backend,
        "threads": engine.threads,
        "mem-fraction-static": engine.mem_fraction_static,
        "tune-seconds": f"{engine.tune_seconds:g}",
        "pool-dir": engine.pool_dir,
        "max-running-requests": engine.max_running,
        "max-queued-requests": engine.max_waiting,
        "mixed-step-tokens": engine.mixed_tokens,
        "lease-s": f"{engine.lease_s:g}",
        "host-cache-gb": engine.host_cache_gb,
        "log-format": engine.log_format,
        "log-level": engine.log_level,
        "transfer": engine.transfer,
    }
    if not engine.open_chunk:
        flags["chunked-prefill-size"] = engine.chunk_tokens
    if engine.disk_cache_dir is not None:
        flags |= {"disk-cache-dir": engine.disk_cache_dir, "disk-cache-gb": f"{engine.disk_cache_gb:g}"}
    if engine.transfer_devices:
        flags["transfer-devices"] = ",".join(engine.transfer_devices)
    if engine.kv_store is not None:
        flags |= {**as_flag("kv-store", engine.kv_store), "kv-store-ttl": engine.kv_store_ttl_s}
    if engine.tokenizer is not None:
        flags["tokenizer"] = engine.tokenizer
    if engine.chat_template is not None:
        flags["chat-template"] = engine.chat_template
    if engine.deterministic:
        flags["deterministic"] = True
    if engine.memory_saver:
        flags["memory-saver"] = True
    if engine.draft_capture_layers:
        flags["draft-capture-layers"] = ",".join(map(str, engine.draft_capture_layers))
    if engine.speculative_token_map is not None:
        flags["speculative-token-map"] = engine.speculative_token_map
    if engine.num_pages is not None:
        flags["num-pages"] = engine.num_pages
    if engine.state_slots is not None:
        flags["state-slots"] = engine.state_slots
    if engine.context_length is not None:
        flags["context-length"] = engine.context_length
    if engine.uniform_experts:
        flags["uniform-experts"] = True
    if engine.max_loras:
        flags |= {"max-loras": engine.max_loras, "max-lora-rank": engine.max_lora_rank}
        if engine.lora_experts:
            flags["lora-experts"] = True
    return flags


def _graph_flags(engine: EngineConfig) -> dict[str, object]:
    flags: dict[str, object] = {} if engine.overlap_schedule else {"disable-overlap-schedule": True}
    if engine.cuda_graph_bs:
        return flags | {"cuda-graph-bs": engine.cuda_graph_bs}
    if engine.cuda_graph_max_bs:
        return flags | {"cuda-graph-max-bs": engine.cuda_graph_max_bs}
    return flags | {"disable-cuda-graph": True}


def _lookup(spec: SpeculationConfig) -> str:
    """Where drafts are looked up, as flags say it."""
    return "suffix" if spec.suffix else "ngram" if spec.ngram else "none"


def _speculation_flags(engine: EngineConfig) -> dict[str, object]:
    spec = engine.speculation
    if not engine.speculates:
        return {}
    flags: dict[str, object] = {"spec-topk": spec.topk}
    if not spec.open_depth:
        flags |= {"spec-steps": spec.steps, "spec-draft-tokens": spec.draft_tokens}
    flags["spec-adaptive" if spec.adaptive else "no-spec-adaptive"] = True
    if engine.draft and (kind := _lookup(spec)) != "none":
        flags[f"spec-{kind}"] = True
    if spec.synthetic_rates:
        flags["rejection-sample-method"] = "synthetic"
        flags["synthetic-acceptance-rates"] = tuple(itertools.accumulate(spec.synthetic_rates, mul))
    return flags


def gateway_argv(gateway: GatewayConfig) -> tuple[str, ...]:
    """The command line of `gateway`. `eyas.cli` parses it to an equal config, except for the keys.

    Plain keys, and addresses with a password, are never part of a command line: they are passed in the
    environment.
    """
    flags: dict[str, object] = {
        **as_flag("registry", gateway.registry),
        "host": gateway.host,
        "port": gateway.port,
        "grpc-port": gateway.grpc_port,
        "model": gateway.model,
        "served-model-name": gateway.names,
        "tool-call-parser": gateway.tool_call_parser,
        "reasoning-parser": gateway.reasoning_parser,
        "drain-s": f"{gateway.drain_s:g}",
        "request-timeout": f"{gateway.request_timeout_s:g}",
        "log-format": gateway.log_format,
        "log-level": gateway.log_level,
        "generation-config": gateway.generation_config,
        "override-generation-config": gateway.override_generation_config,
        "root-path": gateway.root_path,
    }
    if gateway.seed is not None:
        flags["seed"] = gateway.seed
    if gateway.layout == "auto":
        flags |= {"layout": "auto", "ttft-target": gateway.ttft_target, "tpot-target": gateway.tpot_target}
    if gateway.certificate is not None:
        flags |= {"ssl-certfile": gateway.certificate.certfile, "ssl-keyfile": gateway.certificate.keyfile}
    if gateway.cluster != CLUSTER:
        flags["cluster"] = gateway.cluster
    if gateway.registry_ca is not None:
        flags["registry-ca"] = gateway.registry_ca
    if gateway.tls_dir is not None:
        flags["tls-dir"] = gateway.tls_dir
    if gateway.api_key_file is not None:
        flags["api-key-file"] = gateway.api_key_file
    if gateway.vllm_metrics:
        flags["vllm-metrics"] = True
    if gateway.tokenizer is not None:
        flags["tokenizer"] = gateway.tokenizer
    if gateway.chat_template is not None:
        flags["chat-template"] = gateway.chat_template
    if gateway.trust_special_tokens:
        flags["trust-special-tokens"] = True
    if gateway.cors_origins:
        flags["cors-origin"] = ",".join(gateway.cors_origins)
    if gateway.allowed_hosts:
        flags["allowed-host"] = ",".join(gateway.allowed_hosts)
    if gateway.key_limits is not None:
        flags["key-limits"] = gateway.key_limits
    if gateway.otlp_endpoint is not None:
        flags["otlp-endpoint"] = gateway.otlp_endpoint
    if gateway.processes > 1:
        flags["gateway-workers"] = gateway.processes
    if gateway.member is not None:
        flags["member"] = gateway.member
    return ("gateway", *_command_line(flags), "--supervised")


def _command_line(flags: dict[str, object]) -> list[str]:
    """The arguments for `flags`: True gives a flag without a value, a tuple a flag with several values."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words += [f"--{name}"]
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}={value}"]
    return words
