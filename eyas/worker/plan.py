"""Which processes a local cluster is made of, and the command line of each.

It knows the two layouts and who must know whose address. It starts nothing and asks the system nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig, WorkerConfig
from eyas.common.types import Role


@dataclasses.dataclass(frozen=True)
class Plan:
    """The processes of a cluster: workers by name, and the gateway that routes to all of them."""

    workers: dict[str, WorkerConfig]
    gateway: GatewayConfig


def plan(config: ServeConfig, ports: Iterator[int], cores: int) -> Plan:
    """The processes for `config`; CPU engines share the `cores` but one, at least one thread each.

    A core stays free for the fronts and the gateway: an engine whose threads outnumber the free cores waits
    at every barrier for the one that was pushed aside (8 times slower on two cores).
    """
    workers = _unified(config, ports) if config.layout == "unified" else _split(config, ports)
    threads = max(1, (cores - 1) // len(workers))
    workers = {name: _with(worker, threads=threads) for name, worker in workers.items()}
    registry = "static:" + ",".join(worker.address for worker in workers.values())
    return Plan(workers, dataclasses.replace(config.gateway, registry=registry))


def _unified(config: ServeConfig, ports: Iterator[int]) -> dict[str, WorkerConfig]:
    return {"worker": _worker(config.engine, tuple(Role), next(ports))}


def _split(config: ServeConfig, ports: Iterator[int]) -> dict[str, WorkerConfig]:
    def tier(role: Role, count: int) -> dict[str, WorkerConfig]:
        return {f"{role}-{i}": _worker(config.engine, (role,), next(ports)) for i in range(count)}

    drafters = tier(Role.DRAFT, config.draft_workers if config.engine.draft else 0)
    draft_at = tuple(worker.address for worker in drafters.values())
    decoders = tier(Role.DECODE, config.decode)
    decoders = {name: _with(worker, draft_workers=draft_at) for name, worker in decoders.items()}
    return tier(Role.PREFILL, config.prefill) | decoders | drafters


def _worker(engine: EngineConfig, roles: tuple[Role, ...], port: int) -> WorkerConfig:
    worker = WorkerConfig(engine=engine, port=port)
    return _with(worker, roles=roles, worker=worker.address)


def _with(worker: WorkerConfig, /, **changes: object) -> WorkerConfig:
    engine = dataclasses.replace(worker.engine, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(worker, engine=engine)


def worker_argv(worker: WorkerConfig) -> tuple[str, ...]:
    """The command line of `worker`; `eyas.cli` parses it back to an equal config."""
    engine, spec = worker.engine, worker.engine.speculation
    flags: dict[str, object] = {
        "roles": ",".join(engine.roles),
        "host": worker.host,
        "port": worker.port,
        "metrics-port": worker.metrics_port,
        "model": engine.model,
        "draft": engine.draft or "none",
        "device": engine.device,
        "load-format": engine.load_format,
        "threads": engine.threads,
        "num-pages": engine.num_pages,
        "pool-dir": engine.pool_dir,
        "max-running": engine.max_running,
        "chunk-tokens": engine.chunk_tokens,
        "lease-s": f"{engine.lease_s:g}",
        "log-format": engine.log_format,
        "transfer": engine.transfer,
        "spec-steps": spec.steps,
        "spec-topk": spec.topk,
        "spec-draft-tokens": spec.draft_tokens,
    }
    if worker.registry:
        flags["registry"] = worker.registry
    if engine.draft_workers:
        flags["draft-at"] = ",".join(engine.draft_workers)
    return ("worker", *_command_line(flags), "--supervised")


def gateway_argv(gateway: GatewayConfig) -> tuple[str, ...]:
    """The command line of `gateway`; `eyas.cli` parses it back to an equal config."""
    flags: dict[str, object] = {
        "registry": gateway.registry,
        "host": gateway.host,
        "port": gateway.port,
        "grpc-port": gateway.grpc_port,
        "model": gateway.model,
        "served-model": gateway.served_model,
        "log-format": gateway.log_format,
    }
    if gateway.cors_origins:
        flags["cors-origin"] = ",".join(gateway.cors_origins)
    if gateway.api_key:
        flags["api-key"] = gateway.api_key
    return ("gateway", *_command_line(flags), "--supervised")


def _command_line(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
