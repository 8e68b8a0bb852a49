"""Configuration: frozen dataclasses, one per process kind, with every "auto" resolved before freezing.

The command line's defaults are read from here. Nothing reads the environment, and an unknown key is an
error because dataclasses refuse it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from eyas.common.types import Role

ASSETS = Path(__file__).resolve().parent.parent / "assets"
NANO = ASSETS / "nano"
NANO_HEAD = ASSETS / "nano-eagle3"


@dataclass(frozen=True)
class SpeculationConfig:
    """How far a drafter looks ahead: a chain of `steps`, or (topk > 1) a tree of `draft_tokens` nodes.

    `draft_tokens` counts the root; a chain needs steps + 1.
    """

    steps: int = 5
    topk: int = 1
    draft_tokens: int = 6


@dataclass(frozen=True)
class EngineConfig:
    """One engine process: what it loads, how much it may hold, how large its steps may be."""

    model: str = str(NANO)
    draft: str | None = str(NANO_HEAD)  # the draft head's folder; None: no speculation
    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE, Role.DRAFT)
    worker: str = "127.0.0.1:0"  # the address that handles carry
    device: str = "cpu"
    load_format: str = "auto"  # or "dummy": random weights of the configured shape
    attention_backend: str = "torch"
    threads: int = 1
    page_size: int = 16  # rows a page
    num_pages: int = 2048
    pool_dir: str = "/dev/shm"
    max_running: int = 64  # sequences in a step (slots)
    max_waiting: int = 256  # requests queued; one more is refused with 429
    chunk_tokens: int = 256  # prompt rows a step computes at most
    lease_s: float = 30.0
    transfer: str = "auto"  # how KV is pulled: "shm", "grpc", or the first of them that reaches the owner
    transfer_policy: str = "recompute"  # or "fail"
    log_format: str = "text"  # or "json"; also of the front before this engine
    speculation: SpeculationConfig = SpeculationConfig()
    draft_workers: tuple[str, ...] = ()  # whom it may draft with from the start (without the draft role)


@dataclass(frozen=True)
class WorkerConfig:
    """One worker: a front (gRPC server) and its engine."""

    engine: EngineConfig = EngineConfig()
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    metrics_port: int = 0  # 0: any free port
    registry: str = ""  # redis://host:port/db, where others find it and it finds draft workers

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class GatewayConfig:
    """The front door: where it listens, whom it routes to, what it refuses."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    registry: str = "static:"  # static:host:port,host:port or redis://host:port/db
    model: str = str(NANO)
    served_model: str = "eyas-nano"
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()  # whose web pages may call; "*": anybody's
    max_body_bytes: int = 2 * 1024 * 1024
    request_timeout_s: float = 600.0
    log_format: str = "text"  # or "json"


@dataclass(frozen=True)
class ServeConfig:
    """A local cluster: which workers stand behind one gateway."""

    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    layout: str = "split"  # or "unified"
    prefill: int = 1
    decode: int = 1
    draft_workers: int = 1

    @property
    def engines(self) -> int:
        return 1 if self.layout == "unified" else self.prefill + self.decode + self.draft_workers


def replace_engine(config: ServeConfig, **changes: object) -> ServeConfig:
    """A copy of `config` whose engine part has `changes`."""
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, **changes))  # type: ignore[arg-type]
