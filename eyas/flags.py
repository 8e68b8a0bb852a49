"""The flags of the `eyas` command: their names, their defaults and the values that they take.

Every default is read from `eyas.common.config`. A flag that has another name in other servers has that name
too. What flags mean together is decided in `eyas.configuration`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from eyas.common.cluster.names import is_address, is_host
from eyas.common.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    GPU_DEFAULTS,
    GRAPH_ROWS,
    MOST_CHUNK,
    SPARE_STATES,
    EngineConfig,
    GatewayConfig,
    SpeculationConfig,
)
from eyas.common.logging import FORMATS, LEVELS
from eyas.common.params import ADAPTER_NAME, MOST_ADAPTER_NAME, MOST_ADAPTER_RANK
from eyas.common.prompt_room import MOST_TOGETHER
from eyas.common.security.secret_urls import VARIABLES
from eyas.common.types import Role
from kv_transfer.backends.table import AUTO, BACKENDS, NONE

DEFAULT_URL = f"http://{GatewayConfig.host}:{GatewayConfig.port}"
MOST_PROCESSES = 1024
MOST_NUMBER = 2**31 - 1
REGISTRY = "redis[s]://HOST:PORT/DB|static:HOST:PORT,..."


# --- the engine ----------------------------------------------------------------------------------------


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The flags of an engine: model, limits, computing and speculation."""
    _add_model(parser)
    _add_limits(parser)
    _add_computing(parser)
    _add_speculation(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    engine = EngineConfig()
    add = parser.add_argument_group("model and device").add_argument
    text = "a Hugging Face folder, or ORG/NAME on the hub (the embedded model)"
    add("--model", default=engine.model, metavar="MODEL", help=text)
    add_revision(parser)
    text = "its draft head; mtp: the one in its own folder; ngram: none, drafts are looked up in the text; "
    text += "suffix: and in recent answers"
    text += " (the embedded head for the embedded model)"
    add("--draft", metavar="MODEL|mtp|ngram|suffix|none", help=text)
    add("--load-format", default=engine.load_format, choices=["auto", "dummy"], help="dummy: random weights")
    text = (
        "whose code computes the model; auto: Eyas' if it has a file for the architecture, else transformers'"
    )
    add("--model-impl", default=engine.model_impl, choices=["auto", "eyas", "transformers"], help=text)
    add("--device", default=engine.device, help=f"cpu or cuda ({engine.device})")
    add(
        "--tensor-parallel-size",
        "--tp",
        type=positive,
        default=engine.tensor_parallel_size,
        metavar="N",
        help=f"GPUs that share the model ({engine.tensor_parallel_size})",
    )
    add(
        "--dp-attention",
        type=positive,
        default=engine.dp_attention,
        metavar="N",
        help="processes that attend with requests of their own and share a model's experts, whole "
        f"({engine.dp_attention})",
    )
    add(
        "--expert-replicas",
        type=whole,
        default=engine.expert_replicas,
        metavar="N",
        help="room on each of those processes for N further experts of each layer: replicas of what others' "
        f"traffic makes busy ({engine.expert_replicas})",
    )
    add("--dtype", choices=["auto", *DTYPES], help=f"of weights and KV ({_either('dtype')})")
    add(
        "--kv-cache-dtype",
        choices=["auto", "fp8_e4m3"],
        default=engine.kv_cache_dtype,
        help="of KV alone: fp8_e4m3 takes a byte per element, and half of what prefill sends "
        f"({engine.kv_cache_dtype}: as --dtype)",
    )
    add("--context-length", type=positive, metavar="N", help="tokens per request (the model's)")
    add_log(add, engine.log_format, engine.log_level)


def add_log(add: Callable[..., argparse.Action], format: str, level: str) -> None:
    """The flags of a process's log, added by `add`."""
    add("--log-format", choices=FORMATS, default=format, help=f"json: an object per line ({format})")
    text = f"the least of the lines that are written: {', '.join(LEVELS)} ({level})"
    add("--log-level", type=log_level, default=level, metavar="LEVEL", help=text)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of a server's tokenizer. (Benchmarks have a flag of this name for their data sets.)"""
    text = "a folder, or ORG/NAME on the hub: tokenizer, chat template and ends of turns (the model's)"
    parser.add_argument("--tokenizer", dest="server_tokenizer", metavar="TOKENIZER", help=text)


def add_revision(parser: argparse.ArgumentParser) -> None:
    """The revision of a model that is named as on the hub."""
    text = "of a --model on the hub: its branch, tag or commit (main)"
    parser.add_argument("--revision", metavar="REV", help=text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    engine = EngineConfig()
    add = parser.add_argument_group("memory and steps").add_argument
    add("--num-pages", type=positive, metavar="N", help=f"KV pages ({engine.num_pages}; on a GPU what fits)")
    text = "slots of a model with recurrent states: one for each sequence, others for the prefix cache"
    add("--state-slots", type=positive, metavar="N", help=f"{text} (--max-running and {SPARE_STATES} more)")
    add(
        "--mem-fraction-static",
        type=fraction,
        default=engine.mem_fraction_static,
        metavar="F",
        help=f"part of a GPU's memory for weights and KV pages ({engine.mem_fraction_static})",
    )
    add(
        "--max-running-requests",
        "--max-running",
        dest="max_running",
        type=positive,
        metavar="N",
        help=f"sequences per step ({_either('max_running')})",
    )
    add(
        "--max-queued-requests",
        "--max-waiting",
        dest="max_waiting",
        type=positive,
        default=engine.max_waiting,
        metavar="N",
        help=f"requests that may wait in a worker; further ones get a 429 ({engine.max_waiting})",
    )
    _add_step_tokens(add)
    add(
        "--lease-s",
        type=positive,
        default=engine.lease_s,
        metavar="S",
        help=f"seconds for which offered KV pages are kept without a sign of life ({engine.lease_s:g})",
    )
    _add_tiers(add)
    _add_transfer(add)


def _add_transfer(add: Callable[..., argparse.Action]) -> None:
    engine = EngineConfig()
    add("--transfer", default=engine.transfer, choices=[AUTO, *BACKENDS, NONE], help="how KV moves (auto)")
    add(
        "--transfer-devices",
        type=names,
        default=engine.transfer_devices,
        metavar="CARD,...",
        help="the RDMA cards that may carry KV, as /sys/class/infiniband names them (those near each GPU)",
    )


def _add_tiers(add: Callable[..., argparse.Action]) -> None:
    engine = EngineConfig()
    add(
        "--host-cache-gb",
        type=amount,
        default=engine.host_cache_gb,
        metavar="N",
        help="GiB of host memory, per worker, for KV pages that the prefix cache evicts "
        f"({engine.host_cache_gb:g}: none)",
    )
    add(
        "--disk-cache-dir",
        metavar="DIR",
        help="a folder where these pages are kept too, and found again by the next start (none)",
    )
    add(
        "--disk-cache-gb",
        type=amount,
        metavar="N",
        help=f"GiB that it may have ({engine.disk_cache_gb:g})",
    )
    add(
        "--kv-store",
        metavar="URL",
        help="where they are kept for other workers too: redis://HOST:PORT/DB of a Redis or Valkey, or "
        "mooncake://HOST:PORT of a Mooncake Store's master "
        f"(${VARIABLES['kv-store']}; none)",
    )
    add(
        "--kv-store-ttl",
        type=positive,
        metavar="S",
        help=f"seconds for which a page lives there ({engine.kv_store_ttl_s})",
    )


def _add_step_tokens(add: Callable[..., argparse.Action]) -> None:
    add(
        "--chunked-prefill-size",
        "--chunk-tokens",
        dest="chunk_tokens",
        type=positive,
        metavar="N",
        help="the most tokens per step that computes prompts; a GPU takes two thirds where that is faster "
        f"({_either('chunk_tokens')}, or up to {MOST_CHUNK} for experts beside states, "
        f"{MOST_TOGETHER} beside latents)",
    )
    add(
        "--mixed-step-tokens",
        dest="mixed_tokens",
        type=whole,
        metavar="N",
        help="tokens per step that computes prompts and also decodes; prompts of more than 4,096 tokens have "
        "a quarter of them, and more if others wait; 0: the chunked prefill size "
        f"({_either('mixed_tokens')})",
    )


def _add_computing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a GPU")
    usual = f"{EngineConfig.prefill_attention_backend}; on a GPU flashinfer if it is installed, else cudnn"
    for name, rows, default in (
        ("attention", "decoding and verifying", _either("attention_backend")),
        ("prefill-attention", "prompts", usual),
    ):
        choices = ["auto", *ATTENTION_BACKENDS]
        group.add_argument(f"--{name}-backend", choices=choices, help=f"for {rows} ({default})")
    graphs = group.add_mutually_exclusive_group()
    graphs.add_argument(
        "--cuda-graph-max-bs",
        type=positive,
        metavar="N",
        help=f"the largest batch with a CUDA graph ({GPU_DEFAULTS.cuda_graph_max_bs}, or {GRAPH_ROWS} rows)",
    )
    graphs.add_argument(
        "--cuda-graph-bs",
        type=positive,
        nargs="+",
        default=(),
        metavar="N",
        help="the batch sizes with a CUDA graph",
    )
    graphs.add_argument("--disable-cuda-graph", action="store_true", help="launch kernels one by one")
    text = "tokens do not depend, to the bit, on what shares a step (on a CPU they never do)"
    group.add_argument("--deterministic", action="store_true", help=text)
    text = "weights can leave the GPU while the server sleeps (/release_memory_occupation)"
    group.add_argument("--memory-saver", action="store_true", help=text)
    group.add_argument(
        "--disable-overlap-schedule", action="store_true", help="plan each step after the previous one ended"
    )
    group.add_argument(
        "--tune-seconds",
        type=amount,
        metavar="S",
        help="the first start with shapes that no table of this kind of GPU has searches tiles for so long, "
        f"and keeps them in ~/.cache/eyas/tiles ({GPU_DEFAULTS.tune_seconds:g}; 0, and with --deterministic: "
        "rules have them)",
    )
    group.add_argument(
        "--uniform-experts",
        action="store_true",
        help="chance chooses experts, each as often as the others, for benchmarks; answers mean nothing",
    )


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    spec, group = SpeculationConfig(), parser.add_argument_group("speculation")
    add = group.add_argument
    add(
        "--draft-capture-layers",
        type=numbers,
        default=EngineConfig.draft_capture_layers,
        metavar="N,...",
        help="the layers whose input an EAGLE-3 head is fed with, from 0 (those that its config.json means)",
    )
    add(
        "--spec-steps",
        "--speculative-num-steps",
        type=positive,
        metavar="N",
        help=f"draft tokens in depth ({spec.steps}; where depths adapt, all of a head's block)",
    )
    add(
        "--spec-topk",
        "--speculative-eagle-topk",
        type=positive,
        default=spec.topk,
        metavar="N",
        help=f"1: a chain; more: a tree ({spec.topk})",
    )
    add(
        "--spec-draft-tokens",
        "--speculative-num-draft-tokens",
        type=positive,
        metavar="N",
        help="nodes verified, with the root (steps + 1)",
    )
    _add_adaptive(group)
    add(
        "--speculative-token-map",
        metavar="FILE",
        help="the target's ids that the draft head proposes: .pt, a JSON list, or one per line (all)",
    )
    add(
        "--spec-ngram",
        action="store_true",
        help="beside a draft head: drafts are also looked up in prompt and answer",
    )
    add(
        "--spec-suffix",
        action="store_true",
        help="beside a draft head: drafts are also looked up there, and in recent answers to the same caller",
    )
    _add_synthetic(group)


def _add_adaptive(group: argparse._ArgumentGroup) -> None:
    """One value by two flags: None, without either, is for the layout to say."""
    add = group.add_argument
    add(
        "--spec-adaptive",
        "--speculative-adaptive",
        action="store_true",
        default=None,
        help="draft as deep as pays, at most --spec-steps, by measured times and acceptance "
        "(wherever drafts are made beside the target)",
    )
    add(
        "--no-spec-adaptive",
        "--no-speculative-adaptive",
        dest="spec_adaptive",
        action="store_false",
        default=None,
        help="draft --spec-steps deep in every round",
    )


def _add_synthetic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rejection-sample-method",
        choices=["standard", "synthetic"],
        default="standard",
        help="synthetic: drafts are accepted by chance, for benchmarks (standard)",
    )
    add(
        "--synthetic-acceptance-rates",
        type=float,
        nargs="+",
        default=(),
        metavar="P",
        help="for each step, the chance that all drafts up to it are accepted",
    )
    add("--synthetic-acceptance-length", type=float, metavar="L", help="or: mean tokens per round")


def _either(field: str) -> str:
    """A field's two defaults, for a help text."""
    return f"{getattr(EngineConfig(), field)}; on a GPU {getattr(GPU_DEFAULTS, field)}"


# --- clients ------------------------------------------------------------------------------------------


def add_chat(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas chat`."""
    add_server(parser)
    text = "the model, or one of its adapters (the served model)"
    parser.add_argument("--model", default="", metavar="NAME", help=text)
    parser.add_argument("--temperature", type=float, default=0.0, help="(0)")


def add_server(parser: argparse.ArgumentParser, url: str | None = DEFAULT_URL) -> None:
    """The flags that name a running server. `url` None: without one, the command starts its own cluster."""
    default = url or "a cluster of its own"
    text = f"a running server's HTTP address ({default})"
    parser.add_argument("--url", default=url, type=http_url, help=text)
    parser.add_argument("--api-key", metavar="K", help="its key ($EYAS_API_KEY)")
    parser.add_argument("--ca", metavar="FILE", help="the authorities that https trusts (the system's)")


# --- values: each function parses a flag's text, and raises ArgumentTypeError if it is not valid ----------


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return _up_to(MOST_NUMBER, text)


def named_folder(text: str) -> tuple[str, str]:
    """NAME=DIR: the name of an adapter, printable, without spaces or colons, and its folder."""
    name, equals, folder = text.partition("=")
    if not (equals and folder and re.fullmatch(ADAPTER_NAME, name) and len(name) <= MOST_ADAPTER_NAME):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, absolute(folder)


def adapter_rank(text: str) -> int:
    """The largest rank of adapters."""
    return _up_to(MOST_ADAPTER_RANK, text)


def processes(text: str) -> int:
    """A number of processes on this machine."""
    return _up_to(MOST_PROCESSES, text)


def _up_to(most: int, text: str, least: int = 1) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return int(text)


def absolute(text: str) -> str:
    """A folder's path from the root."""
    return str(Path(text).expanduser().absolute())


def whole(text: str) -> int:
    """A whole number, 0 included."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return _up_to(MOST_NUMBER, text, least=0)


def amount(text: str) -> float:
    """A finite number, 0 or above."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or above")
    return value


def fraction(text: str) -> float:
    """A number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction, above 0 and at most 1")
    return value


def log_level(text: str) -> str:
    """One of the log's levels, in small or capital letters."""
    if text.lower() not in LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LEVELS)}")
    return text.lower()


def seed(text: str) -> int:
    """A whole number of 64 bits, with or without a sign."""
    if not re.fullmatch("-?[0-9]{1,20}", text) or not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 64 bits")
    return int(text)


def json_object(text: str) -> str:
    """The text of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return text


def path_prefix(text: str) -> str:
    """The beginning of a URL's path, without a slash at its end; "" or "/": none."""
    prefix = text.rstrip("/")
    if prefix and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", prefix):
        raise argparse.ArgumentTypeError(f"{text!r} is not a path like /eyas")
    return prefix


def model_name(text: str) -> str:
    """A name that requests can give."""
    if not text.strip() or text.startswith("-") or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def port(text: str) -> int:
    """A port; 0: any free one."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def http_url(text: str) -> str:
    """An http or https URL, without a slash at its end."""
    try:
        address = urlsplit(text)
        known = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like {DEFAULT_URL}")
    if address.path.rstrip("/").endswith("/v1"):
        raise argparse.ArgumentTypeError(f"{text!r}: leave out /v1, which is part of every path")
    return text.rstrip("/")


def host(text: str) -> str:
    """A name or an IP address to listen on. IPv6 may stand in brackets, as in URLs: they are left out."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") and ":" in text else text
    if "[" in inside or "]" in inside:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a name nor an IP address")
    return inside


def reachable(text: str) -> str:
    """HOST or HOST:PORT that others can dial."""
    host = text.rpartition(":")[0] if is_address(text) else text
    if not is_host(host):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST or HOST:PORT that others can dial")
    return text


def roles(text: str) -> tuple[Role, ...]:
    """Distinct roles, separated by commas."""
    try:
        return tuple(dict.fromkeys(Role(name) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(Role)}") from error


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(whole(item.strip()) for item in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Names, separated by commas."""
    return tuple(item for part in text.split(",") if (item := part.strip()))
