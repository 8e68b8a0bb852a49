"""What leaves a GPU as weights and KV sleep, how fast it comes back, and that graphs stay valid.

    python -m tests.gpu.time_sleep --out FILE [--weights-gib 16] [--pool-gib 60] [--parts memory engine]

Of memory alone: tensors of an 8B model's sizes from `WeightMemory`, with a captured graph that reads them
all, whose sums are compared to the bit before and after; and a `KvPool` of pages of 2 MiB. Each sleeps three
times; the first time locks memory of the host. Of an engine: an 8B shape of dummy weights with a draft head,
paused under load (retract), asleep, awake and gone on; its answers must be those of before. Writes one JSON
line per sleep: seconds, and the GiB that are free.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch

from eyas.bench.output import append_line
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.common.wire.control import (
    ContinueGeneration,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.loading.startup import EngineStart
from eyas.engine.loading.weight_memory import WeightMemory
from kv_transfer.gpu.cuda import CudaDriver
from tests.gpu.exact_rig import Bed, Engine, Way
from tests.gpu.score_campaign import GRAPHS, PAGES, RUNNING

GIB = 2**30
MATRICES = (4096 * 6144, 4096 * 4096, 4096 * 28672, 14336 * 4096)  # a layer of an 8B model
TIMES = 3


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for JSON lines")
    parser.add_argument("--weights-gib", type=float, default=16.0)
    parser.add_argument("--pool-gib", type=float, default=60.0)
    parser.add_argument("--parts", nargs="+", default=["memory"], choices=["memory", "engine"])
    parser.add_argument("--device", default="cuda", help="of the engine; cpu: a tiny one, to try it")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the engine's model")
    parser.add_argument("--layers", type=int, default=0, help="of the engine's model; 0: all")
    args = parser.parse_args()
    if "engine" in args.parts:
        engine(args)
    if "memory" not in args.parts:
        return
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    weights(args.out, device, int(args.weights_gib * GIB))
    pool(args.out, device, int(args.pool_gib * GIB))


def free_gib() -> float:
    """GiB of the GPU that the driver says are free."""
    torch.cuda.synchronize()
    return round(torch.cuda.mem_get_info()[0] / GIB, 3)


def weights(out: Path, device: torch.device, size: int) -> None:
    """Sleep and wake of weights under a graph."""
    memory = WeightMemory(CudaDriver(0), device)
    before = free_gib()
    made: list[torch.Tensor] = []
    began = time.monotonic()
    with memory.filling():
        while sum(each.nbytes for each in made) < size:
            for elements in (*MATRICES, 4096):
                made.append(torch.randn(elements, dtype=torch.bfloat16, device=device))
                made.append(made.pop() + 1)  # a temporary tensor, as a load has
    torch.cuda.synchronize()
    built = time.monotonic() - began
    sums = torch.zeros(len(made), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    total(made, sums)
    with torch.cuda.graph(graph):
        total(made, sums)
    graph.replay()
    wanted, where = sums.tolist(), [each.data_ptr() for each in made]
    have = sum(each.nbytes for each in made)
    append_line(out, {"what": "made", "s": built, "bytes": have, "taken": memory.size, "before": before})
    for number in range(TIMES):
        awake, began = free_gib(), time.monotonic()
        left = memory.release()
        slept, asleep = time.monotonic() - began, free_gib()
        sums.zero_()
        began = time.monotonic()
        memory.restore()
        torch.cuda.synchronize()
        woke = time.monotonic() - began
        graph.replay()
        same = sums.tolist() == wanted and where == [each.data_ptr() for each in made]
        line = {"what": "weights", "time": number, "bytes": left, "sleep_s": slept, "wake_s": woke}
        append_line(out, line | {"free_awake": awake, "free_asleep": asleep, "same": same})


def total(made: list[torch.Tensor], sums: torch.Tensor) -> None:
    """The sum of each tensor's bits."""
    for i, each in enumerate(made):
        sums[i] = each.view(torch.int16).sum(dtype=torch.int64)


def pool(out: Path, device: torch.device, size: int) -> None:
    """Sleep and wake of a KV pool under a graph."""
    shape = PoolShape(KvFormat(32, 8, 128), size // 2**21, 16, torch.bfloat16, str(device))
    kv = KvPool(shape)
    row, graph = kv.pages[7], torch.cuda.CUDAGraph()
    copy = row.clone()
    with torch.cuda.graph(graph):
        copy.copy_(row)
    proof = kv.pages[-1].cpu().view(torch.int16)
    for number in range(TIMES):
        row.fill_(3.0)
        awake, began = free_gib(), time.monotonic()
        left = kv.release()
        slept, asleep = time.monotonic() - began, free_gib()
        began = time.monotonic()
        kv.restore()
        woke = time.monotonic() - began
        graph.replay()
        same = not copy.any().item() and torch.equal(kv.pages[-1].cpu().view(torch.int16), proof)
        line = {"what": "kv", "time": number, "bytes": left, "sleep_s": slept, "wake_s": woke}
        append_line(out, line | {"free_awake": awake, "free_asleep": asleep, "same": same})
    kv.close()


def engine(args: argparse.Namespace) -> None:
    """Pause, sleep, wake and continue of a whole engine under load."""
    device, began = args.device, time.monotonic()
    shape = "tiny" if device == "cpu" else "llama-3.1-8b"
    bed = Bed(device, shape, Path("/tmp/eyas-sleep") / shape, layers=args.layers)
    sizes = {"num_pages": PAGES, "max_running": RUNNING if device != "cpu" else 8, "max_waiting": 1024}
    options = {} if device == "cpu" else {"cuda_graph_bs": GRAPHS, "memory_saver": True}
    if args.tp > 1:
        options["tensor_parallel_size"] = args.tp
    config = bed.config(Way("exact", "chain 3"), **sizes, **options)  # as of tests.gpu.score_campaign
    EngineStart.of(config).wait_for_kernels()
    rig = Engine(config)
    append_line(args.out, {"what": "started", "s": round(time.monotonic() - began, 1)})
    before = answers(rig, bed, 8)
    for number in range(TIMES):
        ready = free_gib() if device != "cpu" else 0.0
        running = [rig.submit(request, split=False) for request in asked(bed, 8, f"{number}")]
        time.sleep(0.3)
        said: dict[str, object] = {"what": "engine", "time": number, "free_awake": ready}
        for name, command in {
            "pause": PauseGeneration(PauseMode.RETRACT),
            "sleep": ReleaseMemory(wait_s=5.0),
            "wake": ResumeMemory(),
            "continue": ContinueGeneration(),
        }.items():
            began = time.monotonic()
            answer = rig.worker.control(command, 120)
            said[f"{name}_s"] = round(time.monotonic() - began, 4)
            said[name] = str(answer.failure or answer.outcome)
            if name == "sleep" and device != "cpu":
                said["free_asleep"] = free_gib()
        for result in running:
            assert result.done.wait(60) and result.failure is None, result.failure
        after = [result.tokens[0] for result in running]
        append_line(args.out, said | {"same": after == before and answers(rig, bed, 8) == before})
    rig.close()


def asked(bed: Bed, count: int, name: str) -> list[GenerationRequest]:
    """Requests that are alike for every name."""
    dice = random.Random(3)
    return [
        GenerationRequest(
            f"{name} {i}",
            tuple(dice.randrange(10, bed.vocabulary - 300) for _ in range(60 + 40 * i)),
            SamplingParams(max_tokens=200, temperature=0.8, seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


def answers(rig: Engine, bed: Bed, count: int) -> list[list[int]]:
    """What is said alone in time: no pause disturbs it."""
    results = [rig.submit(request, split=False) for request in asked(bed, count, f"u{time.monotonic()}")]
    for result in results:
        assert result.done.wait(60) and result.failure is None, result.failure
    return [result.tokens[0] for result in results]


if __name__ == "__main__":
    main()
