"""Checks that workers' weights and KV pages fit before any process starts: on GPUs, or in a machine's memory.

It compares the least that they take (`eyas.engine.checkpoint.sizes`) with what there is, so what it refuses
could not work. What steps take beside that, and what others hold of a GPU, an engine finds out.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.common.machine.memory import GIB, MemoryBudget
from eyas.common.model_name import model_name
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.sizes import page_bytes, weight_bytes
from eyas.engine.models.table import read_model
from kv_transfer.layout import pages_for


@dataclass(frozen=True)
class MemoryNeeds:
    """The least that each process of an engine takes: bytes of weights, and of a page of KV.

    `shared`: of the weights, what several processes of one machine may have once.
    """

    model: str
    weights: int
    shared: int
    page: int
    longest: int  # pages of a request that fills the context

    @classmethod
    def of(cls, config: EngineConfig) -> MemoryNeeds:
        """Computes the needs from the model's folder."""
        model = _model(config)
        ranks, on_cpu = config.tensor_parallel_size, config.device == "cpu"
        sharers = 1 if on_cpu else config.dp_attention  # on a CPU they are of one machine
        kv = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        amount = weight_bytes(model, config.dtype, config.device, config.deterministic)
        return cls(
            model=model_name(config.model),
            weights=amount.of_rank(ranks, sharers),
            shared=amount.as_stored,
            page=page_bytes(model, config.page_size, kv, ranks),
            longest=pages_for(model.context_length, config.page_size),
        )


def check_room(
    engines: Mapping[str, EngineConfig], gpus: Sequence[int | None], memory: MemoryBudget | None
) -> None:
    """Raises ConfigError, which names the flag, unless the workers' weights and pages fit.

    `gpus`: bytes of each GPU, by number, as far as they are known; `memory`: the machine's (None: unknown).
    """
    targets = [engine for engine in engines.values() if not engine.only_drafts]
    alike = {engine.tensor_parallel_size: engine for engine in targets}  # they differ in nothing else here
    needs = {ranks: MemoryNeeds.of(engine) for ranks, engine in alike.items()}
    for engine in targets:
        own = needs[engine.tensor_parallel_size]
        _check_context(engine, own)
        if engine.device != "cpu":
            _check_gpus(engine, own, gpus)
    if targets and targets[0].device == "cpu":
        _check_machine(targets, own, memory)


def _model(config: EngineConfig) -> ModelConfig:
    model = read_model(config.model, config.load_format, config.texts)
    return model.limited_to(config.context_length)


def _check_context(engine: EngineConfig, needs: MemoryNeeds) -> None:
    """A context that was asked for, and that the pages could never hold."""
    context_length, pages = engine.context_length, engine.num_pages
    if context_length is None or pages is None or needs.longest <= pages:
        return
    flag = "context-length"
    there = f"{pages} pages (--num-pages) hold {pages * engine.page_size}"
    takes = f"{context_length} tokens take {needs.longest} KV pages, {_gib(needs.longest * needs.page)}"
    raise ConfigError(f"--{flag}: {takes}, and {there}: ask for fewer tokens, or for more pages", param=flag)


# --- GPUs ------------------------------------------------------------------------------------------------


def _check_gpus(engine: EngineConfig, needs: MemoryNeeds, gpus: Sequence[int | None]) -> None:
    first = number_of(engine.device)
    own = [size for size in gpus[first : first + engine.device_ranks] if size is not None]
    if not own:
        return
    fraction = engine.mem_fraction_static
    has = f"{fraction:g} of the {_gib(min(own))} of GPU {first} (--mem-fraction-static)"
    room = int(min(own) * fraction) - needs.weights
    each = "" if engine.device_ranks == 1 else f" on each of {engine.device_ranks} GPUs"
    takes = f"the {engine.dtype} weights of {needs.model} take {_gib(needs.weights)}{each}"
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
    """Workers of one command are alike in what they load, and take the memory of one machine."""
    engine, count = engines[0], len(engines)
    pages = (engine.num_pages or 0) * engine.dp_attention
    each = "" if count == 1 else f" in each of {count} workers"
    pool = f"{pages} KV pages take {_gib(pages * needs.page)}{each}"
    pools = count * pages * needs.page
    if memory is not None:
        takes = f"the {engine.dtype} weights of {needs.model} take {_gib(needs.weights)}{each}"
        has = f"the {memory.holder} has {_gib(memory.free)} available"
        left = memory.free - count * (needs.weights - needs.shared) - needs.shared
        caches = int(GIB * sum(each.host_cache_gb for each in engines))
        if left < 0:
            more = "take a smaller model" + (", or fewer workers (--layout unified)" if count > 1 else "")
            raise ConfigError(f"--model: {takes}, and {has}: {more}", param="model")
        if pools > left:
            raise _too_many(f"{pool}, {takes}, and {has}", left // (count * needs.page), engine)
        if caches and pools + caches > left:
            flag, most = "host-cache-gb", (left - pools) / GIB / count
            text = f"{_gib(caches)} asked for, {takes}, {pool}, and {has}: ask for at most {most:.1f}"
            raise ConfigError(f"--{flag}: {text}", param=flag)
    with contextlib.suppress(OSError):  # who makes a pool there says why that cannot be
        free = shutil.disk_usage(engine.pool_dir).free
        if pools > free:
            text = f"{pool}, and {engine.pool_dir} has {_gib(free)} free"
            raise _too_many(text, free // (count * needs.page), engine)


def _too_many(text: str, most: int, engine: EngineConfig) -> ConfigError:
    flag = "num-pages"
    return ConfigError(f"--{flag}: {text}: ask for at most {most // engine.dp_attention}", param=flag)


def _gib(size: int) -> str:
    """Two digits at least; never rounded to nothing."""
    gib = size / GIB
    return f"{gib:.1f} GiB" if gib >= 1 or not gib else f"{gib:.{1 - math.floor(math.log10(gib))}f} GiB"
