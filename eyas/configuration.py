"""Makes configurations of the flags of `eyas.flags`.

It serves every command alike. A flag or folder that
cannot work raises ConfigError, which names the flag.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.cluster.hub import model_folder
from eyas.common.cluster.names import is_redis, is_redis_url, is_unspecified, listed, mooncake_master
from eyas.common.config import (
    LORA_SLOTS,
    NANO,
    NANO_HEAD,
    AdapterConfig,
    CertificateFiles,
    EngineConfig,
    GatewayConfig,
    KvEventsConfig,
    ServeConfig,
    SpeculationConfig,
    WorkerConfig,
    resolve_engine,
)
from eyas.common.errors import ConfigError
from eyas.common.machine import folders
from eyas.common.machine.gpus import visible
from eyas.common.model_folder import model_name, on_hub
from eyas.common.security import api_keys, secret_urls
from eyas.common.types import Role
from kv_transfer.backends import table

# The flags of a local cluster that not every layout has, and the layouts that have them.
LAYOUTS_OF = {
    "prefill": ("split",),
    "decode": ("split",),
    "draft_workers": ("split",),
    "prefill_tp": ("split",),
    "decode_tp": ("split",),
    "workers": ("unified", "auto"),
}
TARGETS = ("ttft_target", "tpot_target")  # of the auto layout


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration from the engine's flags, its models brought here (`eyas.cluster.hub`).

    Raises ConfigError for flags that do not go together, and for models that cannot be had.
    """
    return _brought(_engine(args))


def _brought(engine: EngineConfig) -> EngineConfig:
    """Returns the configuration with folders in place of names on the hub."""
    weights = engine.load_format != "dummy"
    tokenizer = engine.tokenizer and model_folder(engine.tokenizer, "tokenizer", weights=False)
    model = draft = model_folder(engine.model, weights=weights)
    if engine.draft is not None and engine.draft != engine.model:
        draft = model_folder(engine.draft, "draft", weights=weights)
    return dataclasses.replace(engine, model=model, tokenizer=tokenizer, draft=engine.draft and draft)


def _named(args: argparse.Namespace) -> str:
    """The model: a folder, or ORG/NAME[@REVISION]. Raises ConfigError for a revision of a folder."""
    if args.revision is None:
        return str(args.model)
    if (named := on_hub(args.model)) is None or named.revision is not None:
        why = "has a revision already" if named else "is a folder, and revisions are the hub's (ORG/NAME)"
        raise ConfigError(f"--revision: {args.model} {why}", param="revision")
    return f"{args.model}@{args.revision}"


def _tokenizer(args: argparse.Namespace) -> str | None:
    """The tokenizer's folder, or its name on the hub; None: it is the model's, as in all benchmarks."""
    return getattr(args, "server_tokenizer", None) or None


def _engine(args: argparse.Namespace) -> EngineConfig:
    """Makes an engine's configuration. Nothing is fetched from the hub until all flags are checked."""
    _check_transfer(args.transfer)
    _check_tiers(args)
    if args.device == "cpu" and args.transfer in table.BACKENDS and table.direct(args.transfer):
        reason = f"{args.transfer} goes from GPU to GPU (--device cuda)"
        raise ConfigError(f"--transfer: {reason}", param="transfer")
    return resolve_engine(
        args.device,
        model=_named(args),
        tokenizer=_tokenizer(args),
        chat_template=getattr(args, "chat_template", None),
        draft=_draft_folder(args),
        draft_capture_layers=args.draft_capture_layers,
        speculative_token_map=args.speculative_token_map,
        tensor_parallel_size=args.tensor_parallel_size,
        dp_attention=args.dp_attention,
        expert_replicas=args.expert_replicas,
        load_format=args.load_format,
        model_impl=args.model_impl,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        attention_backend=args.attention_backend,
        prefill_attention_backend=args.prefill_attention_backend,
        deterministic=args.deterministic,
        memory_saver=args.memory_saver,
        num_pages=args.num_pages,
        state_slots=args.state_slots,
        mem_fraction_static=args.mem_fraction_static,
        context_length=args.context_length,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        chunk_tokens=args.chunk_tokens,
        mixed_tokens=args.mixed_tokens,
        cuda_graph_max_bs=0 if args.disable_cuda_graph else args.cuda_graph_max_bs,
        cuda_graph_bs=args.cuda_graph_bs,
        overlap_schedule=False if args.disable_overlap_schedule else None,
        tune_seconds=args.tune_seconds,
        uniform_experts=args.uniform_experts,
        lease_s=args.lease_s,
        host_cache_gb=args.host_cache_gb,
        disk_cache_dir=args.disk_cache_dir,
        disk_cache_gb=EngineConfig.disk_cache_gb if args.disk_cache_gb is None else args.disk_cache_gb,
        kv_store=_store(args),
        kv_store_ttl_s=args.kv_store_ttl or EngineConfig.kv_store_ttl_s,
        transfer=args.transfer,
        transfer_devices=args.transfer_devices,
        log_format=args.log_format,
        log_level=args.log_level,
        max_loras=_adapter_slots(args),
        max_lora_rank=getattr(args, "max_lora_rank", EngineConfig.max_lora_rank),
        lora_experts=getattr(args, "lora_experts", False),
        speculation=_speculation_config(args),
    )


def _adapter_slots(args: argparse.Namespace) -> int:
    """Slots for adapters: none where none are loaded and none may be, as in benchmarks. Raises ConfigError
    for a flag that needs some.
    """
    adapters = adapter_config(args)
    slots = getattr(args, "max_loras", None) or (LORA_SLOTS if adapters.loras or adapters.dirs else 0)
    if not slots and getattr(args, "lora_experts", False):
        flag = "lora-experts"
        raise ConfigError(f"--{flag}: needs adapters (--lora, --lora-dir or --max-loras)", param=flag)
    return int(slots)


def adapter_config(args: argparse.Namespace) -> AdapterConfig:
    """The adapters of the start, and the folders of others. Raises ConfigError for a name that comes twice,
    and for a folder that is not there.
    """
    loras, dirs = tuple(getattr(args, "loras", ())), tuple(getattr(args, "lora_dirs", ()))
    if twice := [name for name, count in Counter(name for name, _ in loras).items() if count > 1]:
        raise ConfigError(f"--lora: the name {twice[0]} is given twice", param="lora")
    for flag, folder in (*(("lora", folder) for _, folder in loras), *(("lora-dir", one) for one in dirs)):
        if not Path(folder).is_dir():
            raise ConfigError(f"--{flag}: there is no folder {folder}", param=flag)
    for name, folder in loras:
        if not (Path(folder) / "adapter_config.json").is_file():
            text = f"{folder} has no adapter_config.json: it is no adapter in PEFT's format"
            raise ConfigError(f"--lora: {name}={text}", param="lora")
    return AdapterConfig(loras, dirs)


def _draft_folder(args: argparse.Namespace) -> str | None:
    """The draft head's. Without --draft, only the embedded model has a head."""
    if args.draft is None:
        return str(NANO_HEAD) if is_nano(args.model) else None
    headless = {"none": None, **dict.fromkeys(LOOKUPS)}
    folder: str | None = {**headless, "mtp": _named(args)}.get(args.draft, args.draft)
    return folder


def _check_transfer(transfer: str) -> None:
    if reason := table.missing(transfer):
        raise ConfigError(f"--transfer: {reason}", param="transfer")


def _check_tiers(args: argparse.Namespace) -> None:
    """Raises ConfigError for tiers that hold nothing, lead nowhere, or lack what is before them."""
    through = "KV pages go there through the host's memory: give --host-cache-gb, too"
    folder, store, most = args.disk_cache_dir, _store(args), args.disk_cache_gb
    for flag, fault, wrong in (
        ("disk-cache-dir", through, folder is not None and not args.host_cache_gb),
        ("kv-store", through, store is not None and not args.host_cache_gb),
        ("disk-cache-gb", "of no folder: give --disk-cache-dir, too", most is not None and folder is None),
        ("disk-cache-gb", "0 GiB hold no page", most == 0),
        ("kv-store-ttl", "of no store: give --kv-store, too", args.kv_store_ttl and store is None),
        (
            "kv-store",
            f"{secret_urls.shown(store or '')} is no redis://HOST:PORT/DB or mooncake://HOST:PORT",
            not _is_store(store),
        ),
        ("kv-store-ttl", "Mooncake has none", args.kv_store_ttl and mooncake_master(store or "")),
    ):
        if wrong:
            raise ConfigError(f"--{flag}: {fault}", param=flag)


def _store(args: argparse.Namespace) -> str | None:
    return args.kv_store or secret_urls.from_environment("kv-store")


def _is_store(url: str | None) -> bool:
    return url is None or is_redis_url(url) or mooncake_master(url) is not None


def _check_private(transfer: str, tls_dir: str | None) -> None:
    if tls_dir is not None and transfer in table.IN_PLAIN:
        reason = f"{transfer} does not encrypt KV, as --tls-dir asks: take {table.AUTO} or grpc"
        raise ConfigError(f"--transfer: {reason}", param="transfer")


LOOKUPS = ("ngram", "suffix")
"""Kinds of --draft without a head."""

OF_DRAFTS = (
    "spec_steps",
    "spec_topk",
    "spec_draft_tokens",
    "spec_adaptive",
    "spec_ngram",
    "spec_suffix",
    "draft_capture_layers",
)
"""Flags that are refused where nothing is drafted."""


def _check_drafts(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag of drafts where there are none, or of a head where there is none."""
    usual = SpeculationConfig()
    flags = {
        "spec-steps": args.spec_steps is not None,
        "spec-topk": args.spec_topk != usual.topk,
        "spec-draft-tokens": args.spec_draft_tokens not in (None, usual.draft_tokens),
        "spec-adaptive": args.spec_adaptive,
        "spec-ngram": args.spec_ngram,
        "spec-suffix": args.spec_suffix,
    }
    for flag, there in flags.items():
        if there and not drafts(args):
            advice = "take --draft DIR, --draft ngram or --draft suffix"
            raise ConfigError(f"--{flag}: nothing is drafted without a draft head; {advice}", param=flag)
    if args.draft_capture_layers and _draft_folder(args) is None:
        flag = "draft-capture-layers"
        raise ConfigError(f"--{flag}: there is no draft head that captures (--draft DIR)", param=flag)


def drafts(args: argparse.Namespace) -> bool:
    """Whether anything is drafted, by a head or by looking it up."""
    return args.draft in LOOKUPS or _draft_folder(args) is not None


def _speculation_config(args: argparse.Namespace) -> SpeculationConfig:
    _check_drafts(args)
    suffix = args.spec_suffix or args.draft == "suffix"
    rates, length = args.synthetic_acceptance_rates, args.synthetic_acceptance_length
    steps = args.spec_steps or SpeculationConfig.steps
    if args.rejection_sample_method == "synthetic":
        from eyas.engine.speculation.synthetic import resolve

        rates = resolve(steps, rates, length)
    elif rates or length is not None:
        flag = "synthetic-acceptance-rates" if rates else "synthetic-acceptance-length"
        raise ConfigError(f"--{flag}: needs --rejection-sample-method synthetic", param=flag)
    return SpeculationConfig(
        steps=steps,
        topk=args.spec_topk,
        draft_tokens=args.spec_draft_tokens or steps + 1,
        adaptive=_adapts(args),
        synthetic_rates=tuple(rates),
        ngram=suffix or args.spec_ngram or args.draft == "ngram",
        suffix=suffix,
        open_depth=drafts(args) and not (args.spec_steps or args.spec_draft_tokens or rates),
    )


def _adapts(args: argparse.Namespace) -> bool:
    """Whether depths adapt; where no flag says so, where that costs nothing else and is what serves.

    A drafter elsewhere hears of each round what is wanted, so its drafts could not go by memory; ranks that
    attend with requests of their own have one depth; and benchmarks measure the depth that they name.
    """
    if args.spec_adaptive is not None:
        return bool(args.spec_adaptive)
    chance = args.rejection_sample_method == "synthetic"
    return drafts(args) and not chance and args.dp_attention == 1 and _drafts_beside(args)


def _drafts_beside(args: argparse.Namespace) -> bool:
    """Whether a server that these flags start drafts in the steps of the target, or beside them."""
    if (roles := getattr(args, "roles", None)) is not None:
        return {Role.DECODE, Role.DRAFT} <= set(roles) or _draft_folder(args) is None
    if not hasattr(args, "layout"):  # one engine in the process of a benchmark
        return False
    layout, _ = usual_layout(args)
    beside = args.device != "cpu" and not args.draft_workers
    return layout != "split" or beside or _draft_folder(args) is None


def is_nano(model: str) -> bool:
    """Whether the folder is that of the embedded model."""
    return Path(model).resolve() == NANO


def served_model(model: str) -> str:
    """The name in the API of a model: its name on the hub, or its folder's."""
    return GatewayConfig.served_model if is_nano(model) else model_name(model)


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """The configuration from the flags of `eyas worker`. Raises ConfigError for flags that do not fit."""
    if is_unspecified(args.host) and not args.advertise:
        message = f"--host: {args.host} is no address that others can dial: name one with --advertise HOST"
        raise ConfigError(message, param="host")
    worker = WorkerConfig(
        host=args.host,
        port=args.port,
        advertise=args.advertise,
        metrics_port=args.metrics_port,
        registry=_registry(args) or WorkerConfig.registry,
        registry_ca=args.registry_ca,
        cluster=args.cluster,
        tls_dir=folders.tls_folder(args.tls_dir),
        drain_s=args.drain_s,
        events=_events(args),
        adapters=adapter_config(args),
    )
    engine = dataclasses.replace(
        _engine(args),
        kv_events=worker.events is not None,
        roles=args.roles,
        worker=worker.address,
        threads=args.threads,
        pool_dir=args.pool_dir,
    )
    _check_private(engine.transfer, worker.tls_dir)
    return dataclasses.replace(worker, engine=_brought(engine))


def _registry(args: argparse.Namespace) -> str | None:
    return args.registry or secret_urls.from_environment("registry")


def _events(args: argparse.Namespace) -> KvEventsConfig | None:
    """Where a worker publishes events. Raises ConfigError for a flag that needs another one."""
    if args.kv_events is not None:
        return KvEventsConfig(args.kv_events, args.kv_events_replay, args.kv_events_topic)
    for flag in ("kv-events-replay", "kv-events-topic"):
        if getattr(args, flag.replace("-", "_")) is not None:
            raise ConfigError(f"--{flag}: needs --kv-events ADDRESS", param=flag)
    return None


def gateway_config(args: argparse.Namespace, registry: str = "static:") -> GatewayConfig:
    """The configuration from the gateway's flags, with the members of `registry`.

    `serve_config` says later which layout a local cluster has.
    """
    targets = {name: value for name in TARGETS if (value := getattr(args, name)) is not None}
    return GatewayConfig(
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        registry=registry,
        model=_named(args),
        tokenizer=_tokenizer(args),
        **_names(args),
        generation_config=args.generation_config,
        override_generation_config=args.override_generation_config,
        seed=args.seed,
        root_path=args.root_path,
        **_api_keys(args),
        certificate=_certificate(args),
        tls_dir=folders.tls_folder(args.tls_dir),
        key_limits=args.key_limits,
        cors_origins=args.cors_origin,
        request_timeout_s=args.request_timeout,
        allowed_hosts=tuple(args.allowed_host),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        chat_template=args.chat_template,
        trust_special_tokens=args.trust_special_tokens,
        drain_s=args.drain_s,
        log_format=args.log_format,
        vllm_metrics=args.vllm_metrics,
        log_level=args.log_level,
        otlp_endpoint=args.otlp_endpoint,
        processes=args.gateway_workers,
        **targets,
    )


def _names(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the model's names, each once."""
    first, *others = dict.fromkeys(args.served_model_names or [served_model(args.model)])
    return {"served_model": first, "other_names": tuple(others)}


def gateway_alone(args: argparse.Namespace) -> GatewayConfig:
    """The configuration of `eyas gateway`.

    Raises ConfigError for targets without the auto layout, and for a registry that names no worker.
    """
    _check_targets(args, args.layout)
    if (registry := _registry(args)) is None:
        raise ConfigError("--registry: a gateway needs the workers of its cluster", param="registry")
    if not is_redis(registry) and not listed(registry):
        raise ConfigError(f"--registry: {registry} lists no worker", param="registry")
    config = gateway_config(args, registry)
    tokenizer = config.tokenizer and model_folder(config.tokenizer, "tokenizer", weights=False)
    model = model_folder(config.model, weights=False)
    config = dataclasses.replace(config, model=model, tokenizer=tokenizer)
    return dataclasses.replace(
        config, layout=args.layout, member=args.member, registry_ca=args.registry_ca, cluster=args.cluster
    )


def _check_targets(args: argparse.Namespace, layout: str) -> None:
    for name in TARGETS:
        if getattr(args, name, None) is not None and layout != "auto":
            raise _misplaced(args, name, ("auto",), layout)


def _misplaced(args: argparse.Namespace, name: str, needed: tuple[str, ...], layout: str) -> ConfigError:
    flag = name.replace("_", "-")
    text = f"--{flag}: needs --layout {' or '.join(needed)}, and this one is {layout}"
    if args.layout is None and args.device != "cpu":
        text += f", as is usual where GPUs are seen: {len(set(_gpus(args)))}"
    return ConfigError(text, param=flag)


def _api_keys(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a gateway's keys: from a flag, else those from the environment."""
    if args.api_key_file is not None:
        return {"api_key_file": _key_file(args.api_key_file)}
    if args.api_key is not None:
        return {"api_keys": api_keys.parse(args.api_key, "--api-key")}
    return {"api_keys": api_keys.from_environment()}


def _key_file(path: str) -> str:
    """The path itself. Raises ConfigError unless the file has keys."""
    flag = "api-key-file"
    try:
        keys = api_keys.read(path)
    except ConfigError as error:
        raise ConfigError(f"--{flag}: {error.message}", param=flag) from error
    if not keys:
        raise ConfigError(f"--{flag}: {path}: there is no key in it", param=flag)
    return path


def _certificate(args: argparse.Namespace) -> CertificateFiles | None:
    """The files of the gateway's certificate. Raises ConfigError for a key without one."""
    if args.ssl_certfile is not None:
        return CertificateFiles(args.ssl_certfile, args.ssl_keyfile or args.ssl_certfile)
    if args.ssl_keyfile is not None:
        raise ConfigError("--ssl-keyfile: needs --ssl-certfile", param="ssl-keyfile")
    return None


def client_key(args: argparse.Namespace) -> str | None:
    """The key that a client command sends: the one from the flag, else the first one of the environment."""
    return args.api_key or next(iter(api_keys.from_environment()), None)


def serve_config(args: argparse.Namespace, gateway: GatewayConfig) -> ServeConfig:
    """The configuration of a local cluster, from the flags of its engines and its layout.

    Raises ConfigError for a flag that belongs to the other layout, or that the layout's device cannot do.
    """
    engine = _engine(args)
    _check_private(engine.transfer, gateway.tls_dir)
    layout, workers = usual_layout(args)
    _check_layout(args, layout)
    _check_targets(args, layout)
    _check_gpus(args, engine.device)
    if args.draft_workers is not None and engine.draft is None:
        flag = "draft-workers"
        raise ConfigError(f"--{flag}: there is no draft head that they would run (--draft DIR)", param=flag)
    if layout != "unified" and engine.transfer == table.NONE:
        text = f"--transfer: none keeps pages where --layout {layout} moves them"
        raise ConfigError(text, param="transfer")
    if engine.dp_attention > 1 and engine.device != "cpu" and layout != "unified":
        flag, text = "dp-attention", "pages of attention ranks on GPUs do not travel (--layout unified)"
        raise ConfigError(f"--{flag}: {text}", param=flag)
    ranks = engine.tensor_parallel_size
    named = {name: value for name in LAYOUTS_OF if (value := getattr(args, name)) is not None}
    counts = {"prefill_tp": ranks, "decode_tp": ranks, "workers": workers} | named
    if engine.deterministic and counts["prefill_tp"] != counts["decode_tp"]:
        text = f"--decode-tp: {counts['decode_tp']} is not --prefill-tp {counts['prefill_tp']}, as"
        why = "sums over another number of GPUs have other bits"
        raise ConfigError(f"{text} --deterministic asks: {why}", param="decode-tp")
    adapters = adapter_config(args)
    if taken := [name for name, _ in adapters.loras if name in gateway.names]:
        raise ConfigError(f"--lora: {taken[0]} is the model's own name", param="lora")
    brought = _brought(engine)
    if gateway.model == engine.model:
        gateway = dataclasses.replace(gateway, model=brought.model, tokenizer=brought.tokenizer)
    return ServeConfig(
        gateway=gateway, engine=brought, layout=layout, gpus=args.gpus, adapters=adapters, **counts
    )


def usual_layout(args: argparse.Namespace) -> tuple[str, int]:
    """The layout, asked for or usual, and how many workers it has, but for a flag that says otherwise."""
    ranks = args.tensor_parallel_size * args.dp_attention
    if args.layout not in (None, "auto"):
        return args.layout, ServeConfig.workers
    if args.device == "cpu":
        return ("split", ServeConfig.workers) if args.layout is None else ("auto", 2)
    if args.workers == 1:
        return args.layout or "unified", ServeConfig.workers
    gpus = _gpus(args)
    workers = max(len(gpus) // ranks, 1)
    if args.layout is None and args.dp_attention > 1:  # their pages do not travel
        return "unified", workers
    if args.layout is None and len(set(gpus)) < 2 * ranks:
        return "unified", ServeConfig.workers
    return "auto", workers


def _gpus(args: argparse.Namespace) -> Sequence[int]:
    """The numbers of the GPUs that are to be used."""
    return args.gpus or range(visible() if args.device == "cuda" else 1)


def _check_layout(args: argparse.Namespace, layout: str) -> None:
    for name, needed in LAYOUTS_OF.items():
        if getattr(args, name) is not None and layout not in needed:
            raise _misplaced(args, name, needed, layout)


def _check_gpus(args: argparse.Namespace, device: str) -> None:
    if not args.gpus or device == "cuda":
        return
    why = "needs a GPU (--device cuda)" if device == "cpu" else f"--device {device} names a GPU already"
    raise ConfigError(f"--gpus: {why}", param="gpus")


def own_config(args: argparse.Namespace) -> ServeConfig:
    """The configuration of a cluster for one command, on free ports."""
    gateway = GatewayConfig(
        port=0,
        grpc_port=0,
        model=_named(args),
        tokenizer=_tokenizer(args),
        served_model=served_model(args.model),
        tls_dir=folders.tls_folder(None),
        drain_s=0.0,  # its only client is the command
    )
    return serve_config(args, gateway)
