"""Adapters on one GPU: what a round costs with them beside one without, and how long they take to load.

    python -m tests.gpu.time_lora --out FILE [--rank 16] [--skip-head | --only-head]

Milliseconds of a round of an 8B shape without weights, all linear modules adapted: one sequence and 32,
plain, with one adapter, and with 32 of them. Then loads from a disk and from the host's memory into a slot,
beside eight plain streams, whose gaps are compared. Then chains of three drafts, accepted by chance at 3.0
tokens a round, with an adapter and without. `--device cpu` tries the script out with a tiny shape.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.speculation.synthetic import resolve
from tests.gpu.lines import say
from tests.gpu.steady import (
    TINY,
    Clocked,
    batch_line,
    clocked,
    engine_config,
    going_on,
    shape_folders,
    submit,
    warm,
)
from tests.unit.loopback import wait_all

MANY, STREAMS, WAIT_S = 32, 8, 120
REACH = {"1 one": 1.08, "32 one": 1.10, "32 many": 1.25}
"""Of a round beside one without adapters."""


@dataclass(frozen=True)
class Sizes:
    """Of a run: the shape, a prompt's tokens and an answer's, and how many adapters there are."""

    shape: str
    prompt: int
    answer: int
    many: int


SIZES = {"cuda": Sizes("llama-3.1-8b", 128, 192, MANY), "cpu": Sizes(TINY, 8, 6, 3)}


def write_adapters(folder: Path, model: Path, rank: int, count: int) -> list[Path]:
    """Adapters of all linear modules that differ in their scaling alone: the tensors are stored once."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * dim, config["num_key_value_heads"] * dim
    sides = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, columns) in sides.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns).div_(columns**0.5).bfloat16()
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank).mul_(0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    made = []
    for number in range(count):
        own = folder / f"a{number}"
        own.mkdir()
        os.link(folder / "adapter_model.safetensors", own / "adapter_model.safetensors")
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * (1 + number / 64)}
        (own / "adapter_config.json").write_text(json.dumps(fields))
        made.append(own)
    return made


def requests(sizes: Sizes, adapters: Sequence[str], answer: int = 0) -> list[GenerationRequest]:
    """One for each adapter, "" for none."""
    params = SamplingParams(temperature=0.0, max_tokens=answer or sizes.answer, ignore_eos=True)
    return [
        GenerationRequest(
            f"r{time.perf_counter_ns()}",
            tuple((i * 7 + number) % 500 for i in range(sizes.prompt)),
            params,
            adapter=adapter,
            salt=salt_of("", adapter),
        )
        for number, adapter in enumerate(adapters)
    ]


def round_ms(cluster: Clocked, sizes: Sizes, adapters: Sequence[str]) -> float:
    """Of a batch in which every sequence decodes, the second time."""
    for _ in range(2):
        wait_all(submit(cluster, requests(sizes, adapters)), WAIT_S)
    return batch_line(cluster, len(adapters))["round_ms"]


def gaps_ms(cluster: Clocked, since: float, until: float) -> list[float]:
    """Between the entries of each stream in that time, ascending."""
    streams: dict[str, list[float]] = {}
    for came in list(cluster.came):
        if since <= came.seconds <= until:
            streams.setdefault(came.entry.id, []).append(came.seconds)
    return sorted(1e3 * (b - a) for times in streams.values() for a, b in pairwise(times)) or [0.0]


def time_rounds(cluster: Clocked, sizes: Sizes, ids: Sequence[str], out: Path) -> None:
    """Plain rounds, and with one adapter or many."""
    most = len(ids)
    for batch, ways in ((1, ("one",)), (most, ("one", "many"))):
        plain = round_ms(cluster, sizes, [""] * batch)
        line: dict[str, Any] = {"batch": batch, "plain_ms": plain}
        for way in ways:
            took = round_ms(cluster, sizes, ids if way == "many" else [ids[0]] * batch)
            line |= {f"{way}_ms": took, f"{way}_over_plain": round(took / plain, 3)}
            line[f"{way}_reach"] = REACH.get(f"{batch} {way}")
        say(out, line)


def time_loads(cluster: Clocked, sizes: Sizes, folders: Sequence[Path], out: Path) -> None:
    """Loads beside streams without an adapter: of folders from the disk, of slots from the host's memory."""
    worker = cluster.workers["unified"]
    streams = submit(cluster, requests(sizes, [""] * STREAMS, answer=sizes.answer * 8))
    while cluster.begun < STREAMS:
        time.sleep(0.01)
    marks = [time.perf_counter()]
    time.sleep(0.3)
    marks.append(time.perf_counter())
    ids = [cluster.load_adapter(folder).id for folder in folders]
    marks.append(time.perf_counter())
    before = worker.load.adapters if worker.load else None
    short = [cluster.submit(request, split=False) for request in requests(sizes, ids, answer=2)]
    wait_all(short, WAIT_S)
    marks.append(time.perf_counter())
    time.sleep(0.6)  # the engine says its load every half second
    after = worker.load.adapters if worker.load else None
    assert before is not None and after is not None
    fills = max(after.loads - before.loads, 1)
    line: dict[str, Any] = {
        "folders": len(folders),
        "disk_ms_each": round(1e3 * (marks[2] - marks[1]) / len(folders), 1),
        "fills": after.loads - before.loads,
        "fill_ms_each": round(1e3 * (after.seconds - before.seconds) / fills, 2),
    }
    for name, (since, until) in zip(("alone", "disk", "slots"), pairwise(marks), strict=True):
        gaps = gaps_ms(cluster, since, until)
        line |= {f"gap_{name}_ms": [round(gaps[len(gaps) // 2], 2), round(gaps[-1], 2)]}
    wait_all(streams, WAIT_S)
    say(out, line)


def config_of(device: str, model: Path, slots: int, rank: int, **more: Any) -> EngineConfig:
    """An engine with slots; a graph for each batch that is measured."""
    options: dict[str, Any] = {"model": str(model), "draft": None, "max_loras": slots, "max_lora_rank": rank}
    if device != "cpu":
        options |= {"cuda_graph_bs": (1, 8, MANY), "context_length": 4096, "mixed_tokens": 0}
    else:
        options |= {"chunk_tokens": 32, "num_pages": 64}
    made: EngineConfig = engine_config(device, **options | more)
    return made


def main() -> None:
    """All parts; what fails is printed, and the others run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--skip-head", action="store_true")
    parser.add_argument("--only-head", action="store_true")
    options = parser.parse_args()
    sizes = SIZES[options.device]
    with tempfile.TemporaryDirectory() as scratch:
        model, head = shape_folders(sizes.shape, Path(scratch))
        folders = write_adapters(Path(scratch) / "adapters", model, options.rank, sizes.many + 2)
        if not options.only_head:
            time_without_head(options, model, folders)
        if not options.skip_head:
            with going_on("head"):
                time_head(options, model, head, folders[0])


def time_without_head(options: argparse.Namespace, model: Path, folders: Sequence[Path]) -> None:
    """Rounds, and loads beside them."""
    device, sizes = options.device, SIZES[options.device]
    config = config_of(device, model, sizes.many, options.rank)
    warm([config])
    with clocked(config) as cluster:
        began = time.perf_counter()
        ids = [cluster.load_adapter(folder).id for folder in folders[: sizes.many]]
        print(f"{len(ids)} folders read in {time.perf_counter() - began:.2f} s", flush=True)
        with going_on("rounds"):
            time_rounds(cluster, sizes, ids, options.out)
        with going_on("loads"):
            time_loads(cluster, sizes, folders[sizes.many :], options.out)


def time_head(options: argparse.Namespace, model: Path, head: Path, folder: Path) -> None:
    """Chains of three drafts with an adapter, and without."""
    device, sizes = options.device, SIZES[options.device]
    chance = resolve(3, (), 3.0) if device != "cpu" else ()
    chain = SpeculationConfig(steps=3, topk=1, draft_tokens=4, synthetic_rates=chance)
    config = config_of(device, model, 1, options.rank, draft=str(head), speculation=chain)
    warm([config])
    with clocked(config) as cluster:
        adapter = cluster.load_adapter(folder).id
        for batch in (1, 8):
            plain, one = (round_ms(cluster, sizes, [id] * batch) for id in ("", adapter))
            line = {"chain": 3, "batch": batch, "plain_ms": plain, "one_ms": one}
            line["one_over_plain"] = round(one / plain, 3)
            say(options.out, line)


if __name__ == "__main__":
    main()
