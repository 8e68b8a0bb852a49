"""New weights for an engine that serves: how long no step can run, and that the answers are those of a start.

    python -m tests.gpu.time_updates --out FILE [--shape llama-3.1-8b] [--ways plain "chain 3"] [--times 3]

A trainer is a process of its own, whose weights are in the memory of the same GPU; the engine, of dummy
weights, reads them by CUDA IPC and is told to commit while answers run and are waited for. With `--by group`
the trainer has the next GPU, and broadcasts them in a group (NCCL; on a CPU gloo). Each way: an
update to weights A, to B and back to A; the answers of A must be equal, and, of a small model (`--fresh`),
those of an engine that was started on a folder of A. Writes one JSON line per update: `prepare_s` (the old
weights serve), `pause_s` (no step runs), the longest gap between two tokens of a stream meanwhile and without
an update.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from eyas.bench.output import append_line
from eyas.client.weights import BroadcastTensors, device_buffers
from eyas.common.cluster.listening import free_ports
from eyas.common.params import SamplingParams
from eyas.common.process_groups import MetGroup
from eyas.common.types import GenerationRequest
from eyas.common.weights import (
    DTYPES,
    BytesSource,
    CloseForWeights,
    CommitWeights,
    DeviceBuffer,
    DeviceSource,
    GroupSource,
    JoinGroup,
    PrepareWeights,
    Running,
    Source,
    TensorMeta,
)
from eyas.engine.loading.startup import EngineStart
from tests.gpu.exact_rig import Bed, Engine, Way

LONG = 1500  # tokens of answers that last as long as an update is prepared
GROUP = "weights"
PAGES = 2048  # 32,768 tokens: two engines and a trainer share the GPU
Tensors = dict[str, torch.Tensor]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for JSON lines")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    parser.add_argument("--ways", nargs="+", default=["plain"], choices=["plain", "chain 3"])
    parser.add_argument("--arithmetic", nargs="+", default=["exact"], choices=["fast", "exact"])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--by", default="ipc", choices=["ipc", "group"], help="how the tensors come")
    parser.add_argument("--fresh", action="store_true", help="compare with an engine started on A, too")
    parser.add_argument("--device", default="cuda", help="cpu: interpreted, a tiny shape, to try it")
    args = parser.parse_args()
    shape = "tiny" if args.device == "cpu" else args.shape
    bed = Bed(args.device, shape, Path("/tmp/eyas-updates") / shape, layers=args.layers)
    for arithmetic in args.arithmetic:
        for way in args.ways:
            updates(bed, Way(arithmetic, way), args)


def updates(bed: Bed, way: Way, args: argparse.Namespace) -> None:
    """The updates of one engine."""
    options: dict[str, Any] = {} if bed.device == "cpu" else {"cuda_graph_bs": (1, 8), "num_pages": PAGES}
    if args.tp > 1:
        options["tensor_parallel_size"] = args.tp
    config = bed.config(way, **options)
    EngineStart.of(config).wait_for_kernels()
    folder = Path(config.model)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    place = "cpu" if bed.device == "cpu" else f"cuda:{0 if args.by == 'ipc' else args.tp}"
    address = f"127.0.0.1:{next(free_ports())}" if args.by == "group" else ""
    trainer = context.Process(target=train, args=(theirs, folder, place, address), daemon=True)
    trainer.start()
    theirs.close()  # so that the trainer's end is the end of the pipe
    rig = Engine(config)
    if address:
        joined = rig.worker.change(JoinGroup(GROUP, address, 1, 2, backend(bed.device)), 180)
        assert joined.failure is None, joined.failure
    said: dict[str, list[list[int]]] = {"dummy": answers(rig, bed, "")}
    calm = longest_gap(rig, bed, "")
    digest = ""
    for number in range(args.times):
        name = "AB"[number % 2]
        ours.send(name)
        source = msgspec.msgpack.decode(ours.recv_bytes(), type=DeviceSource | BytesSource | GroupSource)
        line, digest = updated(rig, bed, source, number + 1, digest)
        now = answers(rig, bed, digest)
        same = said.setdefault(name, now) == now
        other = all(now != before for which, before in said.items() if which != name)
        about = {
            "by": args.by,
            "shape": bed.shape,
            "way": f"{way.arithmetic} {way.drafts}",
            "tp": args.tp,
            "to": name,
        }
        append_line(args.out, about | line | {"calm_gap_s": calm, "same": same, "other": other})
    rig.close()
    if args.fresh and (way.drafts == "plain" or way.arithmetic == "exact"):
        ours.send("save")
        written = Path(ours.recv_bytes().decode())
        fresh = Engine(started_on(config, written))
        append_line(args.out, {"what": "fresh start", "same": answers(fresh, bed, "") == said["A"]})
        fresh.close()
    ours.send("")
    trainer.join(30)


def started_on(config: Any, folder: Path) -> Any:
    """The configuration of an engine that starts on a folder; without drafts, which change no answer."""
    return type(config)(**{**vars(config), "model": str(folder), "load_format": "auto", "draft": None})


def updated(rig: Engine, bed: Bed, source: Source, number: int, digest: str) -> tuple[dict[str, Any], str]:
    """One update while streams run; its figures, and the digest of the new weights."""
    running = [rig.submit(request, split=False) for request in asked(bed, 4, digest, LONG)]
    arrivals = [watch(result) for result in running]
    began = time.monotonic()
    prepared = rig.worker.change(PrepareWeights(f"{number}", number, source, whole=True), 300)
    assert prepared.failure is None, prepared.failure
    after = time.monotonic()
    gap = max(each() for each in arrivals)
    closed = rig.worker.change(CloseForWeights(prepared.digest, Running.DRAIN, 120, 60), 180)
    assert closed.failure is None, closed.failure
    ended = time.monotonic()
    done = rig.worker.change(CommitWeights(prepared.digest), 120)
    assert done.failure is None, done.failure
    committed = time.monotonic()
    return {
        "bytes": prepared.nbytes,
        "prepare_s": round(after - began, 3),
        "gap_while_prepared_s": round(gap, 4),
        "drain_s": round(ended - after, 3),
        "pause_s": round(done.seconds, 4),
        "commit_s": round(committed - ended, 4),
    }, prepared.digest


def watch(result: Any) -> Any:
    """Follows a stream; gives a function that says the longest gap between its tokens so far."""
    seen: list[float] = []
    add = result.add

    def noted(entry: Any) -> None:
        seen.append(time.monotonic())
        add(entry)

    result.add = noted
    return lambda: max((b - a for a, b in zip(seen, seen[1:], strict=False)), default=0.0)


def longest_gap(rig: Engine, bed: Bed, digest: str) -> float:
    """Without an update."""
    running = [rig.submit(request, split=False) for request in asked(bed, 4, digest, LONG)]
    arrivals = [watch(result) for result in running]
    for result in running:
        assert result.done.wait(120) and result.failure is None, result.failure
    return float(round(max(each() for each in arrivals), 4))


def asked(bed: Bed, count: int, digest: str, tokens: int = 48) -> list[GenerationRequest]:
    """Requests that are alike for all weights."""
    dice = random.Random(3)
    return [
        GenerationRequest(
            f"{time.monotonic()} {i}",
            tuple(dice.randrange(10, bed.vocabulary - 300) for _ in range(20 + 30 * i)),
            SamplingParams(
                max_tokens=tokens if bed.device != "cpu" else 8, temperature=0.8, seed=i, ignore_eos=True
            ),
            weights=digest,
        )
        for i in range(count)
    ]


def answers(rig: Engine, bed: Bed, digest: str) -> list[list[int]]:
    """What is said."""
    results = [rig.submit(request, split=False) for request in asked(bed, 3, digest)]
    for result in results:
        assert result.done.wait(120) and result.failure is None, result.failure
    return [result.tokens[0] for result in results]


def train(pipe: Connection, folder: Path, device: str, address: str) -> None:
    """The trainer: for each name its weights, as a source; "save": writes those of A to a folder. `address`:
    where the engine meets it, to be rank 0 of a group.
    """
    names = told(folder)
    made: Tensors = {}
    if device != "cpu":
        torch.cuda.set_device(device)
    group = MetGroup(GROUP, address, 0, 2, backend(device), 180.0) if address else None
    while name := pipe.recv():
        if name == "save":
            pipe.send_bytes(str(saved(weights(names, "A", device, {}), folder)).encode())
            continue
        weights(names, name, device, made)
        if device != "cpu":
            torch.cuda.synchronize()
        pipe.send_bytes(msgspec.msgpack.encode(source_of(made, device, group)))
        if group is not None:
            for tensor in made.values():
                group.broadcast(tensor)


def source_of(made: Tensors, device: str, group: MetGroup | None) -> Source:
    """Where the engine gets these tensors from."""
    if group is not None:
        shapes = BroadcastTensors(GROUP, made).shapes
        metas = (TensorMeta(name, DTYPES[dtype], sizes) for name, (dtype, sizes) in shapes.items())
        return GroupSource(GROUP, tuple(metas))
    if device != "cpu":
        buffers = [msgspec.json.decode(one, type=DeviceBuffer) for one in device_buffers(made)]
        return DeviceSource(tuple(buffers))
    from safetensors.torch import save

    return BytesSource((save(made),))


def backend(device: str) -> str:
    """What carries a group's tensors."""
    return "gloo" if device == "cpu" else "nccl"


def weights(names: dict[str, tuple[int, ...]], name: str, device: str, into: Tensors) -> Tensors:
    """Seeded noise of the name, written over that of before."""
    chance = torch.Generator(device).manual_seed(ord(name))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for key, shape in names.items():
        if key not in into:
            into[key] = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            into[key].fill_(1.0)
        else:
            into[key].normal_(0.0, shape[-1] ** -0.5, generator=chance)
    return into


def told(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama folder by its config.json, and their shapes."""
    raw = json.loads((folder / "config.json").read_text())
    hidden, ffn, heads = raw["hidden_size"], raw["intermediate_size"], raw["num_attention_heads"]
    size = raw.get("head_dim") or hidden // heads
    queries, keys = heads * size, raw.get("num_key_value_heads", heads) * size
    ends = {"model.embed_tokens.weight": (raw["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not raw.get("tie_word_embeddings"):
        ends["lm_head.weight"] = (raw["vocab_size"], hidden)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = range(raw["num_hidden_layers"])
    return ends | {f"model.layers.{i}.{name}.weight": layer[name] for i in layers for name in layer}


def saved(made: Tensors, folder: Path) -> Path:
    """A folder of the same model with these weights."""
    from safetensors.torch import save_file

    written = folder.with_name(f"{folder.name}-A")
    written.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".json":
            (written / file.name).write_bytes(file.read_bytes())
    save_file({key: tensor.cpu() for key, tensor in made.items()}, written / "model.safetensors")
    return written


if __name__ == "__main__":
    main()
