"""Whole experts per rank beside tensor parallelism, replicas under a skewed router, and exchanges alone.

    python -m tests.gpu.time_expert_ranks --out DIR [--ranks 2] [--seconds 100] [--kinds v3:ep v3:tp ...]
    python -m tests.gpu.time_expert_ranks --out DIR --together --after FILE [--kinds v3:ep ...]

Cuts of DeepSeek-V3 (3 dense layers and some with 256 experts) and of Qwen3-235B, in FP8 with dummy weights:

* `exchange`: microseconds of a gather, of a sum for its owners, and of a sum of everybody's rows, by rows of
  each rank, inside a CUDA graph; the group's own way beside NCCL's. Before that, how many of 400 calls that
  ranks reach at odd times gave something else than they should.
* `v3:ep`, `qwen:ep`: a rank attends with requests of its own and has an equal share of the experts; `v3:tp`,
  `qwen:tp`: as many GPUs divide every layer. Chance chooses experts. The time of a step at 1 to 512 sequences
  of all ranks, and prompt tokens per second.
* `v3:skew`: a router with favourites, of which the first half of the experts has most, and 16 replicas per
  rank and layer: before there are any, while they are made, and after. `v3:skew-tp`: the same router, every
  layer divided.

Every kind is a process of its own; those that do not fit into SECONDS are skipped. `--compile` compiles the
kernels of all kinds side by side, without a GPU's time. `--together`: all kinds start side by side, beside
other work too; once FILE exists they are measured, one after the other. DIR/experts.jsonl gets a line for
each figure. `--device cpu` tries `v3:ep` and `qwen:ep` in small.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from eyas.bench.shapes import ModelShape, write_model
from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.engine.checkpoint.weights import DummyWeights
from eyas.engine.loading import follower
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import EngineStart
from eyas.engine.parallel.expert_plan import rank_loads
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankChannel, RankFollowers, RankInfo
from tests.gpu import tp_check
from tests.gpu.answer_latent import DENSE, WHOLE, write_whole
from tests.gpu.dp_check import Paced
from tests.gpu.lines import lines_of, say
from tests.gpu.time_parallel import _microseconds, _rows
from tests.unit.loopback import wait_all
from tests.unit.tiny_deepseek import SMALL

BATCHES = (1, 8, 32, 128, 512)
ROWS, HIDDEN = (1, 4, 16, 64, 128, 256, 512, 1024), (7168, 4096)
CHECKS = 150
PROMPTS, PROMPT = 24, 1024
REPLICAS, HOT, FAVOURITES = 16, 0.15, 64
MOVING = 128  # sequences that run while replicas are made
KINDS = ("exchange", "v3:skew", "v3:skew-tp", "qwen:ep", "qwen:tp", "v3:ep", "v3:tp")
LEAST_S, MOST_S, COMPILE_S = 15.0, 70.0, 180.0  # of a kind
START_S, AFTER_S = 150.0, 400.0  # of all kinds together: until they are ready, and until FILE exists
TURN_S = 4.0  # the least that a kind has, however late it is
LOOK_S = 0.05
LONGER, BUSY_STEPS = 100, 30  # tokens of answers, and steps of which the device is watched
MOST_KERNELS = 10
TINY_BATCHES, TINY_PROMPT = (1, 4), 48
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
TINY: dict[str, dict[str, Any]] = {
    "v3": SMALL
    | {
        "vocab_size": WHOLE["vocab_size"],
        "num_hidden_layers": 2,
        "quantization_config": None,
        "rope_parameters": None,
    },
    "qwen": {
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "quantization_config": None,
    },
}
_follow = follower.main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), help="with experts: of v3, of qwen")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--together", action="store_true", help="all kinds start side by side")
    parser.add_argument("--after", type=Path, metavar="FILE", help="with --together: measured once it exists")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--here", choices=KINDS, help="this kind, in this process")
    args = parser.parse_args()
    lines = FigureLines(args.out)
    if args.here is not None:
        try:
            run(args, lines)
        except BaseException:  # its ranks and threads would be waited for
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    args.out.mkdir(parents=True, exist_ok=True)
    write_models(args.out, args.layers, tiny=args.device == "cpu")
    own = [sys.executable, "-m", "tests.gpu.time_expert_ranks", "--out", str(args.out)]
    own += ["--ranks", str(args.ranks), "--device", args.device]
    own += [f"--{way}" for way in ("compile", "together") if getattr(args, way)] + ["--here"]
    if args.compile:
        for each in [subprocess.Popen([*own, kind]) for kind in args.kinds]:
            each.wait(COMPILE_S)
        return
    if args.together:
        measure_together(args, own, lines)
        return
    for kind in args.kinds:
        left = args.seconds - lines.passed_s
        if left < LEAST_S:
            lines.add(skipped=kind)
            continue
        try:
            lines.add(kind=kind, exit=subprocess.run([*own, kind], timeout=min(left, MOST_S)).returncode)
        except subprocess.TimeoutExpired:
            lines.add(kind=kind, timeout=True)


def measure_together(args: argparse.Namespace, own: Sequence[str], lines: FigureLines) -> None:
    """Kinds that start side by side: each warms in its turn, and is measured in its turn, alone."""
    started = {kind: subprocess.Popen([*own, kind], stdin=subprocess.PIPE) for kind in args.kinds}
    try:
        wait_until(lambda: all(_came(lines, started, kind, "ready") for kind in started), START_S)
        for kind, child in started.items():
            _give_turn(child)
            if not wait_until(functools.partial(_came, lines, started, kind, "warm"), MOST_S):
                lines.add(kind=kind, late=True)
                child.kill()
        lines.add(warm=True)
        wait_until(lambda: args.after is None or args.after.exists(), AFTER_S)
        ends = time.monotonic() + args.seconds
        for kind, child in started.items():
            left = max(ends - time.monotonic(), TURN_S)
            _give_turn(child)
            try:
                lines.add(kind=kind, exit=child.wait(min(left, MOST_S)))
            except subprocess.TimeoutExpired:
                lines.add(kind=kind, timeout=True)
                child.kill()
    finally:
        for child in started.values():
            child.kill()


def _came(lines: FigureLines, started: Mapping[str, subprocess.Popen[bytes]], kind: str, word: str) -> bool:
    """Whether a kind has told a word, or has ended."""
    return started[kind].poll() is not None or any(
        line.get("kind") == kind and word in line for line in lines.read()
    )


def _give_turn(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and is told of as such
        child.stdin.write(b"\n")
        child.stdin.flush()


def take_turn(args: argparse.Namespace) -> None:
    """Waits until others have had theirs."""
    if args.together:
        sys.stdin.readline()


def wait_until(there: Callable[[], bool], seconds: float) -> bool:
    """Looks until it is, for so long at most; whether it is."""
    end = time.monotonic() + seconds
    while not (found := there()) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return found


class FigureLines:
    """Figures, as lines of a file and on the screen."""

    def __init__(self, out: Path) -> None:
        self._out, self._began = out, time.monotonic()

    def read(self) -> list[dict[str, Any]]:
        """All that the file has."""
        path = self._out / "experts.jsonl"
        return lines_of(path) if path.exists() else []

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began

    def add(self, **figures: Any) -> None:
        say(self._out / "experts.jsonl", {"s": round(self.passed_s, 1)} | figures)


def write_models(out: Path, layers: Sequence[int], tiny: bool = False) -> None:
    """Folders of both cuts, without weights."""
    write_whole(out / "v3", DENSE + layers[0])
    write_model(ModelShape(4096, 12288, layers[1], 64, 4, vocab=151936), out / "qwen")
    for name, sizes in (("v3", {}), ("qwen", QWEN)):
        path = out / name / "config.json"
        sizes = json.loads(path.read_text()) | sizes | (TINY[name] if tiny else {})
        path.write_text(json.dumps(sizes))


def configured(args: argparse.Namespace, name: str, way: str) -> EngineConfig:
    folder, ranks, divided = args.out / name, args.ranks, way.endswith("tp")
    each = 1 if divided else ranks
    graphs = tuple(sorted({max(1, batch // each) for batch in BATCHES}))
    shared: dict[str, Any] = {"tensor_parallel_size": ranks} if divided else {"dp_attention": ranks}
    if way == "skew":
        shared["expert_replicas"] = REPLICAS
    if args.device == "cpu":
        return resolve_engine(
            model=str(folder), draft=None, load_format="dummy", worker="experts", transfer="none",
            context_length=256, max_running=8, num_pages=256, chunk_tokens=64, **shared,
        )  # fmt: skip
    return resolve_engine(
        "cuda", model=str(folder), draft=None, load_format="dummy", worker="experts", transfer="none",
        context_length=2048, max_running=max(graphs), max_waiting=4096, cuda_graph_bs=graphs,
        cuda_graph_max_bs=max(graphs), mixed_tokens=0, chunk_tokens=1024, num_pages=6000,
        prefill_attention_backend="triton", uniform_experts="skew" not in way, tune_seconds=0.0, **shared,
    )  # fmt: skip


def run(args: argparse.Namespace, lines: FigureLines) -> None:
    """One kind, or its kernels."""
    if args.here == "exchange":
        if not args.compile:
            time_exchanges(args, lines)
        return
    name, way = args.here.split(":")
    config = configured(args, name, way)
    if args.compile:
        EngineStart.of(config).wait_for_kernels()
        return
    tp_check.INPUT, tp_check.OUTPUT = 32, 40
    if "skew" in way:
        skew()
        follower.main = skewed_follower
    threading.excepthook = _end  # else it would be waited for
    engine = Paced(config)
    lines.add(kind=args.here, ready=True)
    take_turn(args)
    small = args.device == "cpu"
    load = StepLoad(TINY_BATCHES, TINY_PROMPT) if small else StepLoad(BATCHES, PROMPT)
    engine.step_ms("warm", 4 if small else 8)
    prompt_rate(engine, "warm", load)
    lines.add(kind=args.here, warm=True)
    take_turn(args)
    if way == "skew":
        time_replicas(engine, lines, load)
    else:
        time_steps(engine, lines, args.here, load)


def _end(failed: threading.ExceptHookArgs) -> None:
    """An engine's thread has failed."""
    sys.excepthook(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    os._exit(1)


@dataclass(frozen=True)
class StepLoad:
    """Sequences of all ranks whose step is timed, and tokens of a prompt."""

    batches: tuple[int, ...]
    prompt: int


def time_steps(engine: Paced, lines: FigureLines, label: str, load: StepLoad) -> None:
    for batch in load.batches:
        lines.add(kind=label, batch=batch, step_ms=engine.step_ms(f"{label} {batch}", batch))
    lines.add(kind=label, batch=load.batches[-1], **busy(engine, f"{label} busy", load.batches[-1]))
    prompt_rate(engine, f"{label} first", load)
    lines.add(kind=label, prompt_tokens_per_s=round(prompt_rate(engine, label, load)))


def busy(engine: Paced, name: str, batch: int) -> dict[str, Any]:
    """The time of a step of `batch` sequences again, and how long rank 0's device had kernels in it: what is
    missing is the host's. And the kernels that took most, in microseconds per step.
    """
    params = SamplingParams(temperature=0.0, max_tokens=LONGER, ignore_eos=True)
    running = [
        engine.submit(engine._request(f"{name} {i}", tp_check.INPUT, params), split=False)
        for i in range(batch)
    ]
    first = len(engine.landed)
    wait_until(lambda: any(step[1] == batch for step in engine.landed[first:]), MOST_S)
    first = len(engine.landed)
    activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        wait_until(lambda: len(engine.landed) > first + BUSY_STEPS, MOST_S)
    steps = engine.landed[first:]
    wait_all(running, MOST_S)
    kernels = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
    covered, end, each = 0.0, 0.0, Counter[str]()
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        start, stop = event.time_range.start, event.time_range.end
        covered, end = covered + max(stop - max(start, end), 0.0), max(end, stop)
        each[event.name[:40]] += stop - start
    count = len(steps) - 1
    return {
        "again_ms": round(1e3 * (steps[-1][0] - steps[0][0]) / count, 3),
        "kernels_ms": round(covered / 1e3 / count, 3),
        "most_us": {kernel: round(us / count, 1) for kernel, us in each.most_common(MOST_KERNELS)},
    }


def prompt_rate(engine: Paced, label: str, load: StepLoad) -> float:
    """Tokens per second of prompts that come at once."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = [engine._request(f"{label} {i}", load.prompt, params) for i in range(PROMPTS)]
    began = time.monotonic()
    wait_all([engine.submit(each, split=False) for each in prompts], MOST_S)
    return PROMPTS * load.prompt / (time.monotonic() - began)


# --- a router with favourites ----------------------------------------------------------------------------


def skew() -> None:
    """Dummy corrections of routers have favourites from here on, as traffic of one domain has."""
    noise = DummyWeights._noise

    def made(self: DummyWeights, name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        found = noise(self, name, shape, dtype)
        if not name.endswith("e_score_correction_bias"):
            return found
        (experts,) = shape
        order = torch.rand(experts, generator=torch.Generator().manual_seed(7)).argsort()
        bias = torch.zeros(experts)
        bias[order[:FAVOURITES]] = torch.linspace(HOT, 0, FAVOURITES)
        bias[: experts // 2] += HOT / 4
        return bias.to(found)

    DummyWeights._noise = made  # type: ignore[method-assign]


def skewed_follower(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    skew()
    _follow(loaded, rank_info, channel)


def time_replicas(engine: Paced, lines: FigureLines, load: StepLoad) -> None:
    """Steps without replicas, while some are made, and with them."""
    balance = engine.worker.engine._parts.balance
    assert balance is not None
    ranks, later = balance._ranks, float("inf")
    balance._next = later
    time_steps(engine, lines, "without replicas", load)
    balance._every_s, balance._next, first, moved = 0.3, 0.0, len(engine.landed), False
    for turn in range(12):
        before = ranks.replicas
        engine.step_ms(f"moving {turn}", MOVING)
        if moved and before == ranks.replicas:
            break
        moved = moved or before != ranks.replicas
    balance._next = later
    steps = [step for step in engine.landed[first:] if step[1] == MOVING]
    gaps = [1e3 * (after[0] - before[0]) for before, after in pairwise(steps)]
    gaps = [gap for gap in gaps if gap < 1e3]  # between two turns prompts come
    replicas = [sum(expert >= 0 for expert in layer) for layer in ranks.replicas]
    lines.add(
        replicas=replicas, median_gap_ms=round(statistics.median(gaps), 2), largest_ms=sorted(gaps)[-5:]
    )
    for own, now in zip(balance._recent, ranks.replicas, strict=True):
        done = [rank_loads(own, ranks.slots, each) for each in (ranks.slots.empty, now)]
        lines.add(loads_of_ranks=[[round(float(x), 3) for x in each / each.mean()] for each in done])
    time_steps(engine, lines, "with replicas", load)


# --- exchanges -------------------------------------------------------------------------------------------


def time_exchanges(args: argparse.Namespace, lines: FigureLines) -> None:
    with RankFollowers(_exchanging, args.ranks, args.out / "meeting") as followers:
        followers.wait_ready(MOST_S)
        group = _group(followers.rank_info)
        for name, figures in _exchanges(group, functools.partial(_in_turn, args, lines)):
            lines.add(rows=name, **figures)
        followers.dismiss()
        group.close()


def _in_turn(args: argparse.Namespace, lines: FigureLines, word: str) -> None:
    lines.add(**{"kind": "exchange", word: True})
    take_turn(args)


def _exchanging(rank_info: RankInfo, channel: RankChannel) -> None:
    channel.ready()
    group = _group(rank_info)
    for _ in _exchanges(group, lambda _: None):
        pass
    group.close()


def _group(rank_info: RankInfo) -> ProcessGroup:
    group = ProcessGroup(rank_info, f"cuda:{rank_info.rank}", AFTER_S)
    group.share_rows()
    return group


def _exchanges(group: ProcessGroup, turn: Callable[[str], None]) -> Iterator[tuple[str, dict[str, float]]]:
    """Checks, then microseconds, on every rank, as soon as they are known. `turn`: of rank 0, for all."""
    device = f"cuda:{group.rank}"
    turn("ready")
    group.barrier()
    yield "first sends", {f"{call} ms": _sends_ms(group, device) for call in ("first", "second")}
    yield "calls", {"wrong": _wrong_calls(group, device), "of": 3 * CHECKS}
    turn("warm")
    group.barrier()
    us = functools.partial(_microseconds, group, calls=8)
    for hidden in HIDDEN:
        for rows in ROWS:
            own = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
            every = torch.zeros(group.ranks * rows, hidden, dtype=torch.bfloat16, device=device)
            yield (
                f"{rows} of {hidden} each",
                {
                    "gather": us(functools.partial(group.gather, own, every)),
                    "NCCL gather": us(functools.partial(group._collect, own, every)),
                    "back": us(functools.partial(group.sum_for_owners, every, own)),
                    "NCCL back": us(functools.partial(group._scatter, every, own)),
                    "sum": us(functools.partial(group.all_reduce, every)),
                    "NCCL sum": us(functools.partial(dist.all_reduce, every)),
                },
            )


def _sends_ms(group: ProcessGroup, device: str) -> float:
    """Milliseconds until every rank has 8 MiB of every other."""
    group.barrier()
    began = time.monotonic()
    group.greet()
    torch.cuda.synchronize(device)
    return round(1e3 * (time.monotonic() - began), 2)


def _wrong_calls(group: ProcessGroup, device: str) -> int:
    """Of gathers and sums for owners, between which other sizes and small tensors come."""
    chance, wrong = random.Random(group.rank), torch.zeros((), dtype=torch.int64, device=device)
    for check in range(CHECKS):
        rows = (check * 37) % 700 + 1
        parts = [_rows(group.ranks * rows, check * group.ranks + r, device) for r in range(group.ranks)]
        torch.cuda._sleep(chance.choice([0, 0, 1000, 100_000]))
        every = group.gather(parts[group.rank][:rows].contiguous())
        wrong += (every != torch.stack([part[:rows] for part in parts])).any()
        whole = parts[group.rank][:rows].clone()
        if group._one_shot is not None and group._one_shot.takes(whole):
            group.all_reduce(whole)
            total = functools.reduce(torch.add, [part[:rows].float() for part in parts])
            wrong += (whole != total.bfloat16()).any()
        own = group.sum_for_owners(parts[group.rank], torch.empty_like(parts[0][:rows]))
        wanted = functools.reduce(torch.add, [part.float() for part in parts]).bfloat16()
        wrong += (own != wanted[group.rank * rows : (group.rank + 1) * rows]).any()
    return int(wrong)


if __name__ == "__main__":
    main()
