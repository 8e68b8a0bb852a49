"""The processes of a local cluster, and the command line of each.

It knows the two layouts; every process gets all addresses. It starts nothing and asks the system nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from operator import mul

from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig, SpeculationConfig, WorkerConfig
from eyas.common.types import Role


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """The processes of a cluster: workers by name, and the gateway that routes to all of them."""

    workers: dict[str, WorkerConfig]
    gateway: GatewayConfig


def plan(config: ServeConfig, ports: Iterator[int], cores: int) -> ClusterPlan:
    """The processes for `config`. CPU engines share all `cores` but one, with at least one thread each.

    One core stays free for the fronts and the gateway: an engine with more threads than free cores waits at
    every barrier for the thread without a core (8 times slower on two cores).
    """
    workers = _unified(config, ports) if config.layout == "unified" else _split(config, ports)
    threads = max(1, (cores - 1) // len(workers))
    workers = {name: _with(worker, threads=threads) for name, worker in workers.items()}
    registry = "static:" + ",".join(worker.address for worker in workers.values())
    workers = {name: dataclasses.replace(worker, registry=registry) for name, worker in workers.items()}
    return ClusterPlan(workers, dataclasses.replace(config.gateway, registry=registry))


def _unified(config: ServeConfig, ports: Iterator[int]) -> dict[str, WorkerConfig]:
    return {"worker": _worker(config.engine, tuple(Role), next(ports))}


def _split(config: ServeConfig, ports: Iterator[int]) -> dict[str, WorkerConfig]:
    def tier(role: Role, count: int) -> dict[str, WorkerConfig]:
        return {f"{role}-{i}": _worker(config.engine, (role,), next(ports)) for i in range(count)}

    drafters = tier(Role.DRAFT, config.draft_workers if config.engine.draft else 0)
    return tier(Role.PREFILL, config.prefill) | tier(Role.DECODE, config.decode) | drafters


def _worker(engine: EngineConfig, roles: tuple[Role, ...], port: int) -> WorkerConfig:
    worker = WorkerConfig(engine=engine, port=port)
    return _with(worker, roles=roles, worker=worker.address)


def _with(worker: WorkerConfig, /, **changes: object) -> WorkerConfig:
    engine = dataclasses.replace(worker.engine, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(worker, engine=engine)


def worker_argv(worker: WorkerConfig) -> tuple[str, ...]:
    """The command line of `worker`. `eyas.cli` parses it to an equal config.

    (Synthetic rates are equal up to rounding, because the flags take their products.)
    """
    flags = {
        "roles": ",".join(worker.engine.roles),
        "host": worker.host,
        "port": worker.port,
        "metrics-port": worker.metrics_port,
        "registry": worker.registry,
        "drain-s": f"{worker.drain_s:g}",
        **_engine_flags(worker.engine),
        **_graph_flags(worker.engine),
        **_speculation_flags(worker.engine.speculation),
    }
    if worker.advertise:
        flags["advertise"] = worker.advertise
    return ("worker", *_command_line(flags), "--supervised")


def _engine_flags(engine: EngineConfig) -> dict[str, object]:
    flags: dict[str, object] = {
        "model": engine.model,
        "draft": engine.draft or "none",
        "device": engine.device,
        "tensor-parallel-size": engine.tensor_parallel_size,
        "load-format": engine.load_format,
        "dtype": engine.dtype,
        "attention-backend": engine.attention_backend,
        "prefill-attention-backend": engine.prefill_attention_backend,
        "threads": engine.threads,
        "mem-fraction-static": engine.mem_fraction_static,
        "pool-dir": engine.pool_dir,
        "max-running-requests": engine.max_running,
        "max-queued-requests": engine.max_waiting,
        "chunked-prefill-size": engine.chunk_tokens,
        "mixed-step-tokens": engine.mixed_tokens,
        "lease-s": f"{engine.lease_s:g}",
        "log-format": engine.log_format,
        "transfer": engine.transfer,
    }
    if engine.num_pages is not None:
        flags["num-pages"] = engine.num_pages
    if engine.context_length is not None:
        flags["context-length"] = engine.context_length
    return flags


def _graph_flags(engine: EngineConfig) -> dict[str, object]:
    flags: dict[str, object] = {} if engine.overlap_schedule else {"disable-overlap-schedule": True}
    if engine.cuda_graph_bs:
        return flags | {"cuda-graph-bs": engine.cuda_graph_bs}
    if engine.cuda_graph_max_bs:
        return flags | {"cuda-graph-max-bs": engine.cuda_graph_max_bs}
    return flags | {"disable-cuda-graph": True}


def _speculation_flags(spec: SpeculationConfig) -> dict[str, object]:
    flags: dict[str, object] = {
        "spec-steps": spec.steps,
        "spec-topk": spec.topk,
        "spec-draft-tokens": spec.draft_tokens,
    }
    if spec.synthetic_rates:
        flags["rejection-sample-method"] = "synthetic"
        flags["synthetic-acceptance-rates"] = tuple(itertools.accumulate(spec.synthetic_rates, mul))
    return flags


def gateway_argv(gateway: GatewayConfig) -> tuple[str, ...]:
    """The command line of `gateway`. `eyas.cli` parses it to an equal config, except for the keys.

    Keys are never part of a command line: they are passed in the environment.
    """
    flags: dict[str, object] = {
        "registry": gateway.registry,
        "host": gateway.host,
        "port": gateway.port,
        "grpc-port": gateway.grpc_port,
        "model": gateway.model,
        "served-model": gateway.served_model,
        "drain-s": f"{gateway.drain_s:g}",
        "log-format": gateway.log_format,
    }
    if gateway.cors_origins:
        flags["cors-origin"] = ",".join(gateway.cors_origins)
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
