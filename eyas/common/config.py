"""Configuration: frozen dataclasses, one per kind of process, with every "auto" resolved before freezing.

The command line takes its defaults from here. The environment is read for API keys
(`eyas.common.security.api_keys`), for addresses with a password (`eyas.common.security.secret_urls`) and by
OpenTelemetry's SDK (`gateway.observe.tracing`). An unknown key is an error, because dataclasses refuse it.
The defaults of `EngineConfig` are those of a CPU; `resolve_engine` has those of a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.common.cluster.names import CLUSTER, is_address, join
from eyas.common.errors import ConfigError
from eyas.common.model_folder import TextSource
from eyas.common.prompt_room import MOST_TOGETHER
from eyas.common.types import EXACT, FAST, Role

ASSETS = Path(__file__).resolve().parent.parent / "assets"
NANO = ASSETS / "nano"
NANO_HEAD = ASSETS / "nano-eagle3"
NANO_EAGLE, NANO_MTP = ASSETS / "nano-eagle", ASSETS / "nano-mtp"  # its other heads
NANO_PEAGLE, NANO_DFLASH = ASSETS / "nano-peagle", ASSETS / "nano-dflash"  # which draft in one pass
SHARED_MEMORY = "/dev/shm"  # can be written to where a container's root cannot

MOST_STEPS, MOST_TOPK, MOST_NODES = 32, 32, 256  # per round: steps, rows per step, nodes verified
MOST_ROWS = 256  # steps times topk: the rows that a drafter computes for one sequence per round


@dataclass(frozen=True)
class SpeculationConfig:
    """How far a drafter looks ahead: a chain of `steps`, or (topk > 1) a tree of `draft_tokens` nodes.

    `draft_tokens` counts the root; a chain needs steps + 1. `synthetic_rates`, for benchmarks: per step, the
    chance that a draft counts as accepted once those before it were, whatever the model computes; (): the
    model decides. `ngram`: drafts are also looked up in prompt and output; without a draft head, that is all.
    `suffix`: then also in recent answers to the same caller.
    `adaptive`: each round goes as far as pays, and at most so far. `open_depth`: no option says how far: a
    head that drafts blocks goes as far as its block where that is adaptive, and never further.
    """

    steps: int = 5
    topk: int = 1
    draft_tokens: int = 6
    synthetic_rates: tuple[float, ...] = ()
    ngram: bool = False
    suffix: bool = False
    adaptive: bool = False
    open_depth: bool = False

    @property
    def width(self) -> int:
        """Rows of one sequence's round: the root and every draft."""
        return self.draft_tokens if self.topk > 1 else self.steps + 1

    @property
    def deepest(self) -> int:
        """The most drafts of one round that can be accepted."""
        return min(self.steps, self.width - 1)

    @property
    def most_draft_tokens(self) -> int:
        """The root and all candidates: topk of the first step, topk² of each later one."""
        return 1 + self.topk + (self.steps - 1) * self.topk**2


FEWEST_SLOTS = 8
"""Slots of states on a GPU that has no room for more."""
SPARE_STATES = 32
"""Slots of states beside those of the sequences of a step, where no option says how many."""


@dataclass(frozen=True)
class EngineConfig:
    """One engine process: what it loads, how much it may hold, how large its steps may be."""

    model: str = str(NANO)
    tokenizer: str | None = None  # the folder of its tokenizer; None: the model's own
    chat_template: str | None = None  # as a gateway's: answers end where it ends turns
    draft: str | None = str(NANO_HEAD)  # the draft head's folder; None: there is none
    draft_capture_layers: tuple[int, ...] = ()  # whose input the head's feature is made of; (): as it says
    speculative_token_map: str | None = None  # a file of the ids that the head proposes; None: all
    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE, Role.DRAFT)
    worker: str = "127.0.0.1:0"  # the address that handles carry
    device: str = "cpu"  # or "cuda"
    tensor_parallel_size: int = 1  # GPUs that share the model
    dp_attention: int = 1  # ranks that attend with requests of their own, and share all experts
    expert_replicas: int = 0  # of each layer on each of these ranks, of its busiest experts elsewhere
    load_format: str = "auto"  # or "dummy": random weights of the configured shape
    model_impl: str = "auto"  # whose code computes it: "eyas", "transformers"; or ours if there is one
    dtype: str = "float32"  # of weights and KV: "bfloat16", "float16" or "float32"
    kv_cache_dtype: str = "auto"  # of the target's KV: "fp8_e4m3", or the same
    attention_backend: str = "torch"  # of decode and verify rows: "torch" or "triton"
    prefill_attention_backend: str = "torch"  # of prompts: the same, or beside triton "flashinfer", "cudnn"
    deterministic: bool = False  # tokens do not depend on what shares a step, to the bit, on a GPU either
    threads: int = 1
    page_size: int = 16  # rows per page
    num_pages: int | None = 2048  # of each attention rank; None: what mem_fraction_static leaves
    state_slots: int | None = None  # of a model with states; None: of all sequences of a step, and some more
    mem_fraction_static: float = 0.88  # of the device's memory, for weights and KV pages
    host_cache_gb: float = 0.0  # GiB of the host's memory for pages that leave the prefix cache; 0: none
    disk_cache_dir: str | None = None  # a folder for pages that leave the host's memory, too; None: none
    disk_cache_gb: float = 50.0  # GiB of that folder
    # The address of a store that workers share (redis://..), likewise; it may have a password.
    kv_store: str | None = dataclasses.field(default=None, repr=False)
    kv_store_ttl_s: int = 24 * 3600  # seconds for which a page lives there
    pool_dir: str = SHARED_MEMORY
    context_length: int | None = None  # tokens; None: the model's
    max_running: int = 64  # sequences in a step (slots), of each attention rank
    max_waiting: int = 256  # requests queued; one more is refused with 429
    chunk_tokens: int = 256  # the most rows of a step with prompts (on a CPU: of its prompt rows)
    open_chunk: bool = False  # no option says so: more of them for a model whose experts want more
    mixed_tokens: int = 0  # rows of a step with prompts and decode rows; 0: chunk_tokens
    cuda_graph_max_bs: int = 0  # the largest batch with a CUDA graph; 0: no graphs
    cuda_graph_bs: tuple[int, ...] = ()  # the batches with a graph; (): the engine's choice up to the largest
    overlap_schedule: bool = False  # prepare a step while the one before it runs
    max_loras: int = 0  # slots of adapters on the device, which a batch mixes; 0: none can be loaded
    max_lora_rank: int = 16  # the largest rank of one; every slot has room for it
    lora_experts: bool = False  # they may update experts, too, and every slot has room for that
    tune_seconds: float = 0.0  # a first start's search for tiles that no table has; 0: none
    memory_saver: bool = False  # weights can leave a GPU at times, and come back
    uniform_experts: bool = False  # chance chooses experts, for benchmarks; answers mean nothing
    lease_s: float = 30.0
    transfer: str = "auto"  # how KV is pulled: by one backend, or the best; "none": it stays
    transfer_devices: tuple[str, ...] = ()  # RDMA cards that may carry KV; (): those near each GPU
    encrypted: bool = False  # KV leaves this host in encrypted ways alone
    kv_events: bool = False  # the front hears the tokens of pages that the prefix cache gets
    log_format: str = "text"  # or "json"; also of the front before this engine
    log_level: str = "info"  # of the lines that are written, the least; of both
    speculation: SpeculationConfig = SpeculationConfig(open_depth=True)

    @property
    def arithmetic(self) -> str:
        """ "exact": a request's tokens follow it alone, to the bit; "fast": but for near-ties.

        In plain torch a CPU's is always exact. Of several GPUs that share a model it is "exact_tp2", by their
        number: sums over other numbers have other bits.
        """
        plain = self.device == "cpu" and self.attention_backend == "torch"
        if not (plain or self.deterministic):
            return FAST
        ranks = self.tensor_parallel_size
        return EXACT if ranks == 1 else f"{EXACT}_tp{ranks}"

    @property
    def texts(self) -> TextSource:
        """The source of the tokenizer and its chat templates."""
        return TextSource(Path(self.tokenizer or self.model), self.chat_template)

    @property
    def device_ranks(self) -> int:
        """Processes that share the model, each with a GPU of its own."""
        return self.tensor_parallel_size * self.dp_attention

    @property
    def only_drafts(self) -> bool:
        """Whether it is a draft worker's: it runs no target model, and drafts for other workers."""
        return set(self.roles) == {Role.DRAFT}

    @property
    def reserve_bytes(self) -> int:
        """Bytes of each GPU that stay free beside its fraction: `RESERVE_BYTES` for every `MOST_TOGETHER`
        prompt tokens that a step may have. A draft worker has no such steps.
        """
        times = 1 if self.only_drafts else max(self.chunk_tokens // MOST_TOGETHER, 1)
        return times * RESERVE_BYTES

    @property
    def round_width(self) -> int:
        """Rows of a round of one sequence: the root and every draft."""
        return self.speculation.width if self.speculates else 1

    @property
    def slots_of_states(self) -> int:
        """Slots of states of a model that has some: what sequences do not take, the prefix cache may. A GPU
        has fewer, where these do not fit and were not asked for.
        """
        return self.state_slots or self.max_running + SPARE_STATES

    @property
    def fewest_slots(self) -> int:
        """Slots of states without which there is no start."""
        fewer = self.state_slots is None and self.num_pages is None and self.device != "cpu"
        return min(self.slots_of_states, FEWEST_SLOTS) if fewer else self.slots_of_states

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted: by a head, by looking it up, or both."""
        return self.draft is not None or self.speculation.ngram


ATTENTION_BACKENDS = ("torch", "triton", "flashinfer", "cudnn")
DTYPES = ("bfloat16", "float16", "float32")
_ON_GPU = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "prefill_attention_backend": "flashinfer" if importlib.util.find_spec("flashinfer") else "cudnn",
    "num_pages": None,
    "max_running": 256,
    "chunk_tokens": 3072,
    "open_chunk": True,
    "mixed_tokens": 512,
    "cuda_graph_max_bs": 256,
    "tune_seconds": 20.0,
    "overlap_schedule": True,
}
GRAPH_ROWS = 1024
"""Larger rounds have no graph by default: of an 8B model they take the device longer than the host."""

EXPERT_ROWS, MOST_CHUNK = 512, 16384
"""Rows that an expert should have in a step of prompts, and rows of such a step, at most."""

RESERVE_BYTES = 4 << 30
"""GPU memory beside its fraction: for the graphs and the activations of the widest step, its logits apart, if
it has no more rows than several prompts may have together; else see `EngineConfig.reserve_bytes`.
"""

GPU_DEFAULTS = EngineConfig(device="cuda", **_ON_GPU)  # type: ignore[arg-type]


def resolve_engine(device: str = "cpu", **requested: Any) -> EngineConfig:
    """The configuration of an engine on `device` with the fields in `requested`.

    A field whose default depends on the device gets that default if it is absent, None or "auto". Raises
    ConfigError, naming the flag, for what the device cannot do.
    """
    defaults = EngineConfig() if device == "cpu" else GPU_DEFAULTS
    if requested.get("attention_backend") == "torch":  # which then attends prompts as well
        defaults = dataclasses.replace(defaults, prefill_attention_backend="torch")
    elif requested.get("deterministic") and device != "cpu":
        defaults = dataclasses.replace(defaults, prefill_attention_backend="triton")
    left = {name for name in _ON_GPU if requested.get(name) in (None, "auto")}
    chosen = {name: value for name, value in requested.items() if name not in left}
    config = dataclasses.replace(defaults, device=device, **chosen)
    _check_draft_tokens(config.speculation)
    if config.context_length is not None and config.context_length < config.page_size:
        flag, least = "context-length", config.page_size
        raise ConfigError(f"--{flag}: at least {least} tokens, which are one page", param=flag)
    if config.speculative_token_map is not None and config.draft is None:
        flag = "speculative-token-map"
        raise ConfigError(f"--{flag}: needs a draft head (--draft DIR)", param=flag)
    _check_lookup(config)
    _check_device(config)
    batches = tuple(sorted(set(config.cuda_graph_bs)))
    largest = min(config.cuda_graph_max_bs, config.max_running)
    if "cuda_graph_max_bs" in left and largest:
        wide = config.speculates and not config.speculation.adaptive  # else they may also be plain
        width = config.speculation.width if wide else 1
        largest = min(largest, max(GRAPH_ROWS // width, 1))
    return dataclasses.replace(
        config,
        open_chunk=config.open_chunk and "chunk_tokens" in left,
        mixed_tokens=min(config.mixed_tokens, config.chunk_tokens),
        cuda_graph_bs=batches,
        cuda_graph_max_bs=max(batches, default=largest),
    )


def _check_device(config: EngineConfig) -> None:
    _check_synthetic(config)
    _check_attention_ranks(config)
    if config.device != "cpu":
        if not re.fullmatch(r"cuda(:[0-9]+)?", config.device):
            raise ConfigError(f"--device: {config.device!r} is neither cpu nor cuda", param="device")
        if config.tensor_parallel_size > 1 and config.attention_backend == "torch":
            flag = "tensor-parallel-size"
            raise ConfigError(f"--{flag}: --attention-backend torch runs on one GPU", param=flag)
        _check_attention(config.attention_backend, config.prefill_attention_backend)
        _check_deterministic(config)
        return
    rules = {
        "dtype": config.dtype == "float32",
        "attention-backend": config.attention_backend == "torch",
        "prefill-attention-backend": config.prefill_attention_backend == "torch",
        "tensor-parallel-size": config.tensor_parallel_size == 1,
        "cuda-graph-bs": not config.cuda_graph_bs,
        "cuda-graph-max-bs": not config.cuda_graph_max_bs,
    }
    for flag, holds in rules.items():
        if not holds:
            value = getattr(config, flag.replace("-", "_"))
            raise ConfigError(f"--{flag}: {value} needs a GPU (--device cuda)", param=flag)


def _check_draft_tokens(spec: SpeculationConfig) -> None:
    """Raises ConfigError for numbers that do not fit together or exceed what a drafter can do."""
    for flag, value, most in (
        ("spec-steps", spec.steps, MOST_STEPS),
        ("spec-topk", spec.topk, min(MOST_TOPK, MOST_ROWS // spec.steps)),
        ("spec-draft-tokens", spec.draft_tokens, MOST_NODES),
    ):
        if value > most:
            beside = "" if flag == "spec-steps" else f" with --spec-steps {spec.steps}"
            raise ConfigError(f"--{flag}: {value} is more than {most}{beside}", param=flag)
    flag, value, most = "spec-draft-tokens", spec.draft_tokens, spec.most_draft_tokens
    if spec.topk == 1 and value != most:
        raise ConfigError(
            f"--{flag}: {value} does not go with --spec-steps {spec.steps} and --spec-topk 1: "
            f"a chain of {spec.steps} drafts and its root are {most}",
            param=flag,
        )
    if not 2 <= value <= most:
        raise ConfigError(
            f"--{flag}: a tree of --spec-steps {spec.steps} and --spec-topk {spec.topk} "
            f"has 2 to {most} nodes, its root too, not {value}",
            param=flag,
        )


def _check_attention_ranks(config: EngineConfig) -> None:
    """Raises ConfigError for what several attention ranks cannot do, whatever the model."""
    if config.dp_attention == 1:
        if config.expert_replicas:
            text = "--expert-replicas: only ranks that share experts have some of others (--dp-attention N)"
            raise ConfigError(text, param="expert-replicas")
        return
    flag = "dp-attention"
    if config.host_cache_gb:
        raise ConfigError(f"--{flag}: attention ranks have no pages in --host-cache-gb", param=flag)
    if config.device == "cpu":
        return
    refusals = {
        "attention ranks on GPUs have one depth of drafts (no --spec-adaptive)": (
            config.speculates and config.speculation.adaptive
        ),
        "attention ranks on GPUs need --attention-backend triton": config.attention_backend == "torch",
        "attention ranks have no exact arithmetic on GPUs (--deterministic)": config.deterministic,
        "attention ranks on GPUs share no layers (--tensor-parallel-size 1)": config.tensor_parallel_size > 1,
    }
    for reason, refused in refusals.items():
        if refused:
            raise ConfigError(f"--{flag}: {reason}", param=flag)


def _check_lookup(config: EngineConfig) -> None:
    """Raises ConfigError for trees where all drafts are looked up."""
    if config.draft is None and config.speculation.ngram and config.speculation.topk > 1:
        flag = "spec-topk"
        raise ConfigError(f"--{flag}: what is looked up alone is a chain, which has 1", param=flag)


def _check_synthetic(config: EngineConfig) -> None:
    """Raises ConfigError where chance is asked to accept, or to choose experts, and cannot."""
    if config.uniform_experts and config.attention_backend == "torch":
        flag = "uniform-experts"
        raise ConfigError(f"--{flag}: needs a GPU and --attention-backend triton (--device cuda)", param=flag)
    flag = "rejection-sample-method"
    if not config.speculation.synthetic_rates:
        return
    if config.draft is None:
        raise ConfigError(f"--{flag}: synthetic needs a draft head (--draft DIR)", param=flag)
    if config.attention_backend == "torch":
        raise ConfigError(
            f"--{flag}: synthetic needs a GPU and --attention-backend triton (--device cuda)", param=flag
        )


def _check_attention(rounds: str, prompts: str) -> None:
    """Raises ConfigError for backends that do not go together on a GPU."""
    if rounds in ("flashinfer", "cudnn"):
        flag = "attention-backend"
        advice = f"take it for prompts (--prefill-attention-backend {rounds})"
        raise ConfigError(f"--{flag}: {rounds} wants lengths that only the GPU knows; {advice}", param=flag)
    if (rounds == "torch") != (prompts == "torch"):
        flag = "prefill-attention-backend"
        raise ConfigError(f"--{flag}: {prompts} does not go with --attention-backend {rounds}", param=flag)


def _check_deterministic(config: EngineConfig) -> None:
    """Raises ConfigError for what has no exact arithmetic on a GPU, whatever the model."""
    refusals = {
        "attention-backend": config.attention_backend == "torch",
        "prefill-attention-backend": config.prefill_attention_backend in ("flashinfer", "cudnn"),
        "dtype": config.dtype == "float32",
    }
    for flag, refused in refusals.items():
        if config.deterministic and refused:
            value = getattr(config, flag.replace("-", "_"))
            text = f"--{flag}: {value} has no exact arithmetic on a GPU, as --deterministic asks"
            raise ConfigError(text, param=flag)


@dataclass(frozen=True)
class KvEventsConfig:
    """Where a worker publishes what its prefix cache gets and loses: addresses as ZMQ has them. One with `*`,
    of no single host, or of ipc, is bound, another is dialled; `replay`, where subscribers ask for what they
    missed, is bound.
    `topic`: None: made of the worker's address and the model.
    """

    endpoint: str
    replay: str | None = None
    topic: str | None = None


LORA_SLOTS = 8
"""Adapters that a step mixes, where some are loaded or may be and no flag says how many."""


@dataclass(frozen=True)
class AdapterConfig:
    """The adapters that a worker begins with, and where others may come from."""

    loras: tuple[tuple[str, str], ...] = ()  # (name, folder), loaded before it serves
    dirs: tuple[str, ...] = ()  # folders below which callers may name some; (): they may load none


@dataclass(frozen=True)
class WorkerConfig:
    """One worker: a front (gRPC server) and its engine."""

    engine: EngineConfig = EngineConfig()
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    advertise: str | None = None  # HOST or HOST:PORT by which others reach it; None: where it listens
    metrics_port: int = 0  # 0: any free port
    # The workers it may dial: static:host:port,... or redis[s]://host:port/db
    registry: str = dataclasses.field(default="static:", repr=False)
    registry_ca: str | None = None  # authorities for the certificate of rediss://; None: the system's
    cluster: str = CLUSTER  # its name among those that share a Redis database
    tls_dir: str | None = None  # its certificate and the cluster's authority; None: services talk in plain
    drain_s: float = 30.0  # seconds for what it has accepted, once it is asked to leave
    events: KvEventsConfig | None = None  # None: it publishes none
    adapters: AdapterConfig = AdapterConfig()

    @property
    def address(self) -> str:
        """The address that others reach this worker by, if `port` is not 0."""
        return self.reached_at(self.port)

    def reached_at(self, port: int) -> str:
        """The address that others reach this worker by when it listens on `port`."""
        named = self.advertise or self.host
        return named if is_address(named) else join(named, port)


@dataclass(frozen=True)
class CertificateFiles:
    """The certificate that callers are shown, and its key, in PEM; the two may stand in one file."""

    certfile: str
    keyfile: str


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway: where it listens, which workers it routes to, its limits and defaults.

    `sampling`: the model's own defaults, by field of `SamplingParams`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    # static:host:port,host:port or redis[s]://host:port/db
    registry: str = dataclasses.field(default="static:", repr=False)
    registry_ca: str | None = None  # as a worker's
    cluster: str = CLUSTER  # as a worker's
    layout: str = "static"  # requests go by the workers' roles; or "auto": where it is predicted to be best
    ttft_target: float = 1.0  # of auto, in seconds: a good request's first token comes within
    tpot_target: float = 0.05  # of auto, in seconds: its mean time per later token, at most
    model: str = str(NANO)
    tokenizer: str | None = None  # as an engine's
    served_model: str = "eyas-nano"  # its name
    other_names: tuple[str, ...] = ()  # by which callers may name it too; an answer repeats the one it got
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # plain ones; (): there are none
    api_key_file: str | None = None  # the hashes of the valid keys; then `api_keys` is empty
    certificate: CertificateFiles | None = None  # of HTTPS and gRPC over TLS; None: callers speak in plain
    tls_dir: str | None = None  # what workers are shown; None: they are asked in plain
    key_limits: str | None = (
        None  # a file of what each key may use (`gateway.limits.quotas`); None: no limits
    )
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call; "*": any
    allowed_hosts: tuple[str, ...] = ()  # more names that callers without keys may call it by; "*": any
    max_body_bytes: int | None = None  # None: as much as a prompt of the model's context can take
    max_connections: int = 4096  # of each front
    request_timeout_s: float = 7 * 86_400.0  # a week: no limit while tokens come (`gateway.backends.running`)
    tool_call_parser: str = "auto"  # the format of calls: "auto": the chat template's; "none": there are none
    reasoning_parser: str = "auto"  # the same of the reasoning
    chat_template: str | None = None  # itself, or its file; None: that beside the tokenizer
    trust_special_tokens: bool = False  # in the texts of chats: they count as those that the template writes
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # where a request says nothing
    generation_config: str = "auto"  # the source of `sampling`: "auto": the model's; "vllm": none; a folder
    override_generation_config: str = "{}"  # a JSON object of values that count more
    seed: int | None = None  # of requests that give none; None: a random one for each
    root_path: str = ""  # under which a proxy shows it, as /eyas
    drain_s: float = 30.0  # seconds for open requests, once it is asked to leave
    log_format: str = "text"  # or "json"
    vllm_metrics: bool = False  # the page of metrics has vLLM's names too
    log_level: str = "info"
    otlp_endpoint: str | None = None  # takes the spans of calls; None: as OpenTelemetry's variables say
    processes: int = 1  # that share its ports; every limit holds for each
    member: str | None = None  # of those processes, this one's socket; None: it is alone

    @property
    def texts(self) -> TextSource:
        """The source of the tokenizer and its chat templates."""
        return TextSource(Path(self.tokenizer or self.model), self.chat_template)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names in the API, the one by which it is known elsewhere first."""
        return (self.served_model, *self.other_names)


@dataclass(frozen=True)
class ServeConfig:
    """A local cluster: one gateway and its workers.

    `prefill`, `decode`, `draft_workers`: workers of the split layout; None: one of the last, but none on
    GPUs, which then draft where they decode. `prefill_tp`, `decode_tp`: GPUs per worker. `workers`: of the
    other two layouts. `gpus`: numbers, worker after worker; (): as many as needed, from the engine's on.
    """

    gateway: GatewayConfig = GatewayConfig(drain_s=5.0)  # short: a person at the keyboard waits
    engine: EngineConfig = EngineConfig()
    layout: str = "split"  # or "unified", or "auto": as unified, and prompts may be computed elsewhere
    prefill: int = 1
    decode: int = 1
    draft_workers: int | None = None
    prefill_tp: int = 1
    decode_tp: int = 1
    workers: int = 1
    gpus: tuple[int, ...] = ()
    adapters: AdapterConfig = AdapterConfig()
