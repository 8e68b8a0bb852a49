"""Checks before any process of a cluster starts: of folders, and that weights and KV pages fit.

The folders must contain a model and a head that can be served. Only file names, small files and the headers
of large ones are read, without torch: the engine checks the shapes of tensors, and that a head fits its
model. The least memory for weights and pages (`eyas.engine.checkpoint.sizes`) is compared with the memory of
the GPUs or the machine, so a refused configuration could never work. The engine accounts for the memory of
steps, and of other processes on a GPU.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.common.config import EngineConfig, GatewayConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.common.machine.memory import GIB, MemoryBudget
from eyas.common.model_folder import TextSource, model_name, read_json_object
from eyas.common.tokenizers.source import TOKENIZER_FILES, read_tokenizer, tokenizer_file
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.folder import PICKLED, check_whole, has_weights, read_config, tensor_shapes
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.sizes import groups_of, page_bytes, replica_share, state_bytes, weight_bytes
from eyas.engine.kv.groups import pages_of_longest
from eyas.engine.models.keys import reading
from eyas.engine.models.mtp_names import layer_count, prefixes_among
from eyas.engine.models.table import check_architecture, read_model
from eyas.engine.models.unserved import MISTRALS_OWN
from gateway.text.sampling_defaults import sampling_defaults
from gateway.text.tokenizer_files import load_chat_template


def check_engine(config: EngineConfig) -> None:
    """Raises ConfigError unless the folders have what an engine needs, and it supports the models in them."""
    check_model(config.model, config.load_format, config.chat_template, config.tokenizer)
    check_draft(config.draft, config.load_format)
    _check_own_layers(config)
    model = read_model(
        config.model, "dummy", config.texts, config.model_impl
    )  # the files are checked already
    model.limited_to(config.context_length)


def check_gateway(config: GatewayConfig) -> None:
    """Raises ConfigError unless the folders have what a gateway needs; it reads no weights."""
    check_model(config.model, "dummy", config.chat_template, config.tokenizer)
    if config.tokenizer is not None:
        check_vocabulary(config.tokenizer, config.model)


def check_model(
    folder: str, load_format: str = "auto", template: str | None = None, tokenizer: str | None = None
) -> None:
    """Raises ConfigError unless `folder` has config.json, a tokenizer and, unless "dummy", weights.

    `tokenizer`: the folder that has the tokenizer instead. The chat template beside the tokenizer, or
    `template` instead of it, must compile, and the model's sampling defaults must be valid.
    """
    if (stated := _check_folder(folder, "model") / "config.json").is_file():
        check_architecture(read_json_object(stated, "model"), folder)  # no other weights would help
    _check(folder, "model", ["config.json"], load_format)
    if tokenizer is not None:
        _check_folder(tokenizer, "tokenizer")
    flag, named = ("model", folder) if tokenizer is None else ("tokenizer", tokenizer)
    if tokenizer_file(Path(named)) is None:
        raise ConfigError(f"--{flag}: {named} has no tokenizer ({TOKENIZER_FILES})", param=flag)
    load_chat_template(Path(named), template)
    sampling_defaults(folder)


def check_vocabulary(tokenizer: str, model: str) -> None:
    """Raises ConfigError for a tokenizer that cannot be read, or that has ids beyond the model's
    vocabulary.
    """
    largest = max(read_tokenizer(Path(tokenizer)).get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= (size := read_model(model, "dummy", TextSource(Path(tokenizer))).vocab_size):
        text = f"{tokenizer} has token ids up to {largest}, and {model} embeds {size} (0 to {size - 1})"
        raise ConfigError(f"--tokenizer: {text}", param="tokenizer")


def check_draft(folder: str | None, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` is None (no drafting) or has the files of a draft head."""
    if folder is not None:
        _check(folder, "draft", ["config.json"], load_format)


def _check_own_layers(config: EngineConfig) -> None:
    """Raises ConfigError for `--draft mtp` with a model that has no MTP layer.

    For pickled weights the engine checks it: their names cannot be read without torch.
    """
    folder = Path(config.model)
    if config.draft is None or Path(config.draft).resolve() != folder.resolve():
        return
    if config.load_format == "dummy":
        has_layer = layer_count(read_config(folder)) > 0
    elif any(folder.glob(PICKLED)):
        has_layer = True
    else:
        with reading(folder):
            quantized = read_quantized(read_config(folder))
        has_layer = bool(prefixes_among(tensor_shapes(folder, quantized)))
    if not has_layer:
        raise ConfigError(f"--draft: {folder} has no MTP layer to draft with", param="draft")


def _check(folder: str, flag: str, names: list[str], load_format: str) -> None:
    path = _check_folder(folder, flag)
    missing = [name for name in names if not (path / name).is_file()]
    if missing and (path / "params.json").is_file():
        raise ConfigError(f"--{flag}: {folder} has {MISTRALS_OWN}: it takes a config.json", param=flag)
    if load_format != "dummy" and not has_weights(path):
        gguf = " (GGUF files are not read)" if any(path.glob("*.gguf")) else ""
        missing.append(f"*.safetensors{gguf}")
    if missing:
        raise ConfigError(f"--{flag}: {folder} has no {' and no '.join(missing)}", param=flag)
    read_json_object(path / "config.json", flag)
    if load_format != "dummy":
        check_whole(path)


def _check_folder(folder: str, flag: str) -> Path:
    if folder.encode(errors="replace").decode() != folder:  # processes send each other the path in UTF-8
        raise ConfigError(f"--{flag}: the path {folder!a} is not UTF-8", param=flag)
    if not (path := Path(folder)).is_dir():
        raise ConfigError(f"--{flag}: {folder} is not a folder", param=flag)
    return path


@dataclass(frozen=True)
class MemoryNeeds:
    """The least memory of each process of an engine, in bytes: its weights, and one page of KV.

    `shared`: the part of the weights that processes of one machine may share. `states`: all slots of states.
    """

    model: str
    weights: int
    shared: int
    page: int
    longest: int  # pages of a request that fills the context
    states: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> MemoryNeeds:
        """Computes the needs from the model's folder."""
        model = _model(config)
        ranks, on_cpu = config.tensor_parallel_size, config.device == "cpu"
        sharers = 1 if on_cpu else config.dp_attention  # on a CPU they are of one machine
        replicas = replica_share(model, config) * (config.dp_attention if on_cpu else 1)
        kv = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        amount = weight_bytes(model, config.dtype, config.device, config.deterministic)
        groups = groups_of(model, config)
        return cls(
            model=model_name(config.model),
            weights=amount.of_rank(ranks, sharers, replicas),
            shared=amount.as_stored,
            page=page_bytes(model, config.page_size, kv, ranks, groups),
            longest=pages_of_longest(groups, model.context_length, config.page_size, 0),
            states=state_bytes(model, config),
        )


def check_room(
    engines: Mapping[str, EngineConfig], gpus: Sequence[int | None], memory: MemoryBudget | None
) -> None:
    """Raises ConfigError, which names the flag, unless the workers' weights and pages fit.

    `gpus`: bytes of each GPU, by number (None: unknown); `memory`: of the machine (None: unknown).
    """
    targets = [engine for engine in engines.values() if not engine.only_drafts]
    alike = {engine.tensor_parallel_size: engine for engine in targets}  # they differ in nothing else here
    needs = {ranks: MemoryNeeds.of(engine) for ranks, engine in alike.items()}
    if needs and max(needs) % min(needs) and any(own.states for own in needs.values()):
        text = f"{model_name(targets[0].model)} has recurrent states, whose heads {max(needs)} ranks"
        text = f"--decode-tp: {text} cannot exchange with {min(needs)}: take a multiple"
        raise ConfigError(text, param="decode-tp")
    for engine in targets:
        own = needs[engine.tensor_parallel_size]
        _check_context(engine, own)
        if engine.device != "cpu":
            _check_gpus(engine, own, gpus)
    if targets and targets[0].device == "cpu":
        _check_machine(targets, own, memory)


def _model(config: EngineConfig) -> ModelConfig:
    model = read_model(config.model, config.load_format, config.texts, config.model_impl)
    return model.limited_to(config.context_length)


def _check_context(engine: EngineConfig, needs: MemoryNeeds) -> None:
    """Raises ConfigError for a --context-length that exceeds the KV pages of --num-pages."""
    context_length, pages = engine.context_length, engine.num_pages
    if context_length is None or pages is None or needs.longest <= pages:
        return
    flag = "context-length"
    has = f"{pages} pages (--num-pages) hold {pages * engine.page_size}"
    takes = f"{context_length} tokens take {needs.longest} KV pages, {_gib(needs.longest * needs.page)}"
    raise ConfigError(f"--{flag}: {takes}, and {has}: ask for fewer tokens, or for more pages", param=flag)


# --- GPUs ------------------------------------------------------------------------------------------------


def _check_gpus(engine: EngineConfig, needs: MemoryNeeds, gpus: Sequence[int | None]) -> None:
    first = number_of(engine.device)
    own = [size for size in gpus[first : first + engine.device_ranks] if size is not None]
    if not own:
        return
    fraction = engine.mem_fraction_static
    has = f"{fraction:g} of the {_gib(min(own))} of GPU {first} (--mem-fraction-static)"
    room = int(min(own) * fraction) - needs.weights - needs.states
    each = "" if engine.device_ranks == 1 else f" on each of {engine.device_ranks} GPUs"
    takes = f"the {engine.dtype} weights of {needs.model} take {_gib(needs.weights)}{each}"
    if needs.states:
        takes += f", its slots of states (--state-slots) {_gib(needs.states)}"
    if room < 0:
        more = "share it among more GPUs (--tp), or take a smaller one"
        raise ConfigError(f"--model: {takes}, more than {has}: {more}", param="model")
    if engine.num_pages is not None:
        flag, pages, subject = "num-pages", engine.num_pages, f"{engine.num_pages} KV pages"
    elif engine.attention_backend != "torch":
        flag, pages = "context-length", needs.longest
        subject = f"KV pages of a request of {needs.longest * engine.page_size} tokens"
    else:
        return
    if (fit := room // needs.page) < pages:
        most = fit if flag == "num-pages" else fit * engine.page_size
        text = f"{subject} take {_gib(pages * needs.page)}{each}, and {takes}: together more than {has}"
        raise ConfigError(f"--{flag}: {text}; ask for at most {most}", param=flag)


# --- a CPU -----------------------------------------------------------------------------------------------


def _check_machine(engines: Sequence[EngineConfig], needs: MemoryNeeds, memory: MemoryBudget | None) -> None:
    """Raises ConfigError unless all workers fit. They load the same model, and share one machine's memory."""
    engine, count = engines[0], len(engines)
    pages = (engine.num_pages or 0) * engine.dp_attention
    each = "" if count == 1 else f" in each of {count} workers"
    pool = f"{pages} KV pages take {_gib(pages * needs.page)}{each}"
    pools = count * (pages * needs.page + needs.states)
    if needs.states:
        pool += f", slots of states (--state-slots) {_gib(needs.states)}"
    if memory is not None:
        takes = f"the {engine.dtype} weights of {needs.model} take {_gib(needs.weights)}{each}"
        has = f"the {memory.holder} has {_gib(memory.free)} available"
        left = memory.free - count * (needs.weights - needs.shared) - needs.shared
        caches = int(GIB * sum(each.host_cache_gb for each in engines))
        if left < 0:
            more = "take a smaller model" + (", or fewer workers (--layout unified)" if count > 1 else "")
            raise ConfigError(f"--model: {takes}, and {has}: {more}", param="model")
        if pools > left:
            most = max(left - count * needs.states, 0) // (count * needs.page)
            raise _too_many(f"{pool}, {takes}, and {has}", most, engine)
        if caches and pools + caches > left:
            flag, room = "host-cache-gb", (left - pools) / GIB / count
            text = f"{_gib(caches)} asked for, {takes}, {pool}, and {has}: ask for at most {room:.1f}"
            raise ConfigError(f"--{flag}: {text}", param=flag)
    with contextlib.suppress(OSError):  # making a pool there fails later, and says why
        free = shutil.disk_usage(engine.pool_dir).free
        if pools > free:
            text = f"{pool}, and {engine.pool_dir} has {_gib(free)} free"
            raise _too_many(text, max(free - count * needs.states, 0) // (count * needs.page), engine)


def _too_many(text: str, most: int, engine: EngineConfig) -> ConfigError:
    flag = "num-pages"
    return ConfigError(f"--{flag}: {text}: ask for at most {most // engine.dp_attention}", param=flag)


def _gib(size: int) -> str:
    """Two digits at least; never rounded to nothing."""
    gib = size / GIB
    return f"{gib:.1f} GiB" if gib >= 1 or not gib else f"{gib:.{1 - math.floor(math.log10(gib))}f} GiB"
