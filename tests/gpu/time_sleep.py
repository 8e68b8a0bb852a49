"""What leaves a GPU as weights and KV sleep, how fast it comes back, and that graphs stay valid.

    python -m tests.gpu.time_sleep --out FILE [--weights-gib 16] [--pool-gib 60]

Weights: tensors of an 8B model's sizes from `WeightMemory`, with a captured graph that reads them all, whose
sums are compared to the bit before and after. KV: a `KvPool` of pages of 2 MiB. Each sleeps three times; the
first time locks memory of the host. Writes one JSON line per sleep: seconds, and the GiB that are free.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from eyas.bench.output import append_line
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.loading.weight_memory import WeightMemory
from kv_transfer.gpu.cuda import CudaDriver

GIB = 2**30
MATRICES = (4096 * 6144, 4096 * 4096, 4096 * 28672, 14336 * 4096)  # a layer of an 8B model
TIMES = 3


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for JSON lines")
    parser.add_argument("--weights-gib", type=float, default=16.0)
    parser.add_argument("--pool-gib", type=float, default=60.0)
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
