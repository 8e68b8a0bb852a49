"""DeepSeek-V3's sizes on two GPUs: attention ranks beside one rank, and beside tensor parallelism.

    python -m tests.gpu.dp_check --out DIR [--parts one two dp tp drafts undrafted] [--few 4] [--many 18]

Every part is a process of its own with a time limit, by the engine itself, with dummy weights of one seed:

* `one`, `two`: 3 dense layers and FEW with experts, on one rank and on two attention ranks. The same requests
  alone and together: log-probabilities of tokens that are given, and greedy tokens.
* `two` then has 10,000 short requests in waves of 1 to 400, some cancelled; then a rank is killed.
* `dp`, `tp`: 3 and MANY layers, experts chosen by chance; the time of a step by the number of sequences.
* `drafts`, `undrafted`: two attention ranks, FEW layers and a NextN layer, experts chosen by chance, with
  drafts (chains of 3, of which chance accepts 1.2) and without: the time of a step, tokens per round; with
  drafts also 2,000 short requests.

DIR/dp.jsonl has a line for each thing that is found, at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.ipc.messages import CancelGeneration, Event, StepReply
from eyas.engine.loading.startup import EngineStart
from eyas.engine.speculation.synthetic import resolve
from tests.gpu.answer_latent import DENSE, write_whole
from tests.gpu.tp_check import Timed
from tests.unit.loopback import Result, Worker, wait_all

LIMITS_S = {"one": 200.0, "two": 390.0, "dp": 290.0, "tp": 290.0, "drafts": 390.0, "undrafted": 240.0}
ROOMY = 130 << 30  # bytes of a GPU that has room for half of 18 layers' experts
LENGTHS = (1, 3, 17, 40, 64, 130, 300, 700, 1500)  # of prompts; a chunk has 1024 rows
GIVEN, TOKENS = 42, 12
BATCHES = (1, 2, 16, 64, 128)  # sequences, of all ranks
DRAFTED_BATCHES = (2, 16, 64)  # one, eight and 32 of each rank
SOAK, DRAFTED_SOAK, SOAK_S, WAVES = 10_000, 2_000, 120.0, (1, 2, 3, 64, 400)
STEPS, LENGTH = 3, 2.2  # drafts in a row, and tokens per round
STUCK_S = 30.0  # no short request takes so long
IDS = 100_000  # below it are the ids of prompts
CHAIN = SpeculationConfig(STEPS, 1, STEPS + 1, resolve(STEPS, (), LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=list(LIMITS_S), choices=LIMITS_S)
    parser.add_argument("--few", type=int, default=4)
    parser.add_argument("--many", type=int, default=0, help="(18, or 9 where a GPU has less than 130 GiB)")
    parser.add_argument("--here", choices=LIMITS_S, help="this part, in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    many = args.many or (18 if torch.cuda.get_device_properties(0).total_memory > ROOMY else 9)
    told = Told(args.out, args.here or "")
    if args.here is not None:
        run(args.here, told, args.few, many)
        os._exit(0)
    for layers in {args.few, many}:
        write_whole(args.out / f"v3-{layers}", DENSE + layers, num_nextn_predict_layers=1)
    own = ["--out", str(args.out), "--few", str(args.few), "--many", str(many)]
    for part in args.parts:
        command = [sys.executable, "-m", "tests.gpu.dp_check", *own, "--here", part]
        try:
            done = subprocess.run(command, timeout=LIMITS_S[part])
            told.line(part=part, exit=done.returncode)
        except subprocess.TimeoutExpired:
            told.line(part=part, timeout_s=LIMITS_S[part])
    if {"one", "two"} <= set(args.parts):
        compare(told)


class Told:
    """Where lines go, and files of answers."""

    def __init__(self, out: Path, part: str) -> None:
        self.out, self._part, self._began = out, part, time.monotonic()

    def line(self, **found: Any) -> None:
        words = {"part": self._part, "s": round(time.monotonic() - self._began, 1)} | found
        print(json.dumps(words), flush=True)
        with (self.out / "dp.jsonl").open("a") as file:
            file.write(json.dumps(words) + "\n")


def configured(folder: Path, **changes: Any) -> EngineConfig:
    config = resolve_engine(
        "cuda", model=str(folder), draft=None, load_format="dummy", worker="dp", transfer="none",
        context_length=4096, max_running=128, max_waiting=4096, cuda_graph_bs=(1, 2, 4, 8, 16, 32, 64, 128),
        mixed_tokens=512, chunk_tokens=1024, num_pages=4096, prefill_attention_backend="triton",
    )  # fmt: skip
    return replace(config, **changes)


def run(part: str, told: Told, few: int, many: int) -> None:
    ranks = {"one": {}, "tp": {"tensor_parallel_size": 2}}
    folder = told.out / f"v3-{many if part in ('dp', 'tp') else few}"
    changes: dict[str, Any] = {} if part in ("one", "two") else {"uniform_experts": True}
    if part in ("drafts", "undrafted"):
        changes |= {"max_running": 64, "cuda_graph_bs": (1, 2, 4, 8, 16, 32, 64), "cuda_graph_max_bs": 64}
    if part == "drafts":
        changes |= {"draft": str(folder), "speculation": CHAIN}
    config = configured(folder, **ranks.get(part, {"dp_attention": 2}), **changes)
    EngineStart.of(config).wait_for_kernels()
    told.line(did="compiled", card=torch.cuda.get_device_name(), model=folder.name)
    engine = Paced(config)
    told.line(did="ready", pages=engine.worker.ready.pages_total)
    if part in ("dp", "tp"):
        for batch in BATCHES:
            if batch <= config.max_running * config.dp_attention:
                engine.step_ms(f"warm{batch}", batch)
                told.line(batch=batch, step_ms=engine.step_ms(f"timed{batch}", batch))
        return
    if part in ("drafts", "undrafted"):
        drafted(engine, told)
        if part == "drafts":
            soak(engine, told, DRAFTED_SOAK, seeded=False)
        return
    found = {"together": answers(engine, together=True), "alone": answers(engine, together=False)}
    (told.out / f"answers-{part}.json").write_text(json.dumps(found))
    told.line(did="answered")
    if part == "two":
        soak(engine, told)
        told.line(killed=engine.lose_a_follower())


class Paced(Timed):
    """An engine of which is known when steps landed, and of how many requests and tokens each told."""

    def __init__(self, config: EngineConfig) -> None:
        self.landed: list[tuple[float, int, int]] = []
        super().__init__(config)

    def event(self, worker: Worker, event: Event) -> None:
        if isinstance(event, StepReply):
            tokens = sum(len(entry.tokens) for entry in event.entries)
            self.landed.append((time.perf_counter(), len(event.entries), tokens))
        super().event(worker, event)

    def step_ms(self, name: str, batch: int) -> float:
        """Median between steps that told of all `batch` requests."""
        first = len(self.landed)
        self.tpot_ms(name, batch)
        steps = self.landed[first:]
        spans = [b[0] - a[0] for a, b in zip(steps, steps[1:], strict=False) if a[1] == b[1] == batch]
        return round(1e3 * statistics.median(spans), 3)


def drafted(engine: Paced, told: Told) -> None:
    """The time of a step, and the tokens of a round, by the number of sequences."""
    for batch in DRAFTED_BATCHES:
        engine.step_ms(f"warm{batch}", batch)
        first = len(engine.landed)
        step_ms = engine.step_ms(f"timed{batch}", batch)
        rounds = sum(entries for _, entries, _ in engine.landed[first:])
        tokens = sum(tokens for _, _, tokens in engine.landed[first:])
        told.line(batch=batch, step_ms=step_ms, tokens_per_round=round(tokens / rounds, 3))


def asked() -> list[GenerationRequest]:
    """Of every length one whose tokens are given, and a greedy one."""
    rng, made = random.Random(5), []
    for length in LENGTHS:
        prompt = tuple(rng.randrange(10, IDS) for _ in range(length))
        for kind, more in (("given", {"logit_bias": {GIVEN: 100.0}, "prompt_logprobs": 1}), ("greedy", {})):
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, **more)
            made.append(GenerationRequest(f"{kind}-{length}-{time.monotonic_ns()}", prompt, params))
    return made


def answers(engine: Paced, *, together: bool) -> dict[str, Any]:
    """By kind and length: tokens, and the log-probability of each."""
    requests, found = asked(), {}
    for some in [requests] if together else [[request] for request in requests]:
        results = [engine.submit(request, split=False) for request in some]
        wait_all(results, 120)
        for request, result in zip(some, results, strict=True):
            entries = sorted(result.entries, key=lambda entry: entry.index)
            values = [one.logprob for entry in entries for one in entry.logprobs or ()]
            found[request.id.rsplit("-", 1)[0]] = {"tokens": result.tokens[0], "logprobs": values}
    return found


def compare(told: Told) -> None:
    """Two ranks with one, beside what one differs from itself."""
    try:
        one, two = (json.loads((told.out / f"answers-{part}.json").read_text()) for part in ("one", "two"))
    except OSError as error:
        told.line(compared=str(error))
        return
    pairs = {
        "one rank, together and alone": (one["together"], one["alone"]),
        "two ranks and one, alone": (two["alone"], one["alone"]),
        "two ranks and one, together": (two["together"], one["together"]),
    }
    for name, (a, b) in pairs.items():
        given = [key for key in a if key.startswith("given")]
        gaps = [
            abs(x - y) for key in given for x, y in zip(a[key]["logprobs"], b[key]["logprobs"], strict=True)
        ]
        same = [_alike(a[key]["tokens"], b[key]["tokens"]) for key in a if key not in given]
        told.line(
            compared=name,
            logprobs_of_given_tokens={"mean gap": statistics.mean(gaps), "largest": max(gaps)},
            greedy_tokens_alike=f"{sum(same)} of {TOKENS * len(same)} before the first difference",
        )


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def soak(engine: Paced, told: Told, count: int = SOAK, *, seeded: bool = True) -> None:
    """Short requests in waves; ends the process if one hangs. `seeded`: some of them are drawn."""
    runner, idle, steps = engine.worker.engine._parts.runner, [0], [0]
    launch = runner.launch

    def noted(works):
        steps[0] += 1
        idle[0] += len({work.seq.generation.rank for work in works}) == 1
        return launch(works)

    runner.launch = noted
    rng, began, sent, open_ = random.Random(3), time.monotonic(), 0, []
    while sent < count and time.monotonic() - began < SOAK_S:
        for _ in range(min(rng.choice(WAVES), count - sent)):
            open_.append(_short(engine, rng, sent, seeded=seeded))
            sent += 1
            if len(open_) > 200:  # some always run while others come
                _ends(open_.pop(0), told)
        if rng.random() < 0.5:
            while open_:
                _ends(open_.pop(0), told)
    while open_:
        _ends(open_.pop(0), told)
    seconds = round(time.monotonic() - began, 1)
    told.line(soaked=sent, seconds=seconds, steps=steps[0], steps_with_an_idle_rank=idle[0])
    runner.launch = launch


def _short(engine: Paced, rng: random.Random, number: int, *, seeded: bool) -> Result | None:
    """One that was submitted; None if it is cancelled at once."""
    prompt = tuple(rng.randrange(10, IDS) for _ in range(rng.choice((1, 2, 9, 17, 60))))
    drawn = {"temperature": 1.0, "seed": number} if seeded and number % 3 == 0 else {"temperature": 0.0}
    params = SamplingParams(max_tokens=rng.choice((1, 1, 2, 3, 6)), ignore_eos=True, **drawn)
    choices = tuple(map(RequestChoice, range(1 + number % 7 // 6)))  # forks join, on one rank alone
    request = GenerationRequest(f"soak-{number}", prompt, params, choices)
    result = engine.submit(request, split=False)
    if rng.random() >= 0.02:
        return result
    engine.by_role["decode"].send(CancelGeneration(f"soak-{number}"))
    return None


def _ends(result: Result | None, told: Told) -> None:
    if result is None or (result.done.wait(STUCK_S) and result.failure is None):
        return
    told.line(hangs=result.failure or f"a request has not ended in {STUCK_S:g} s")
    os._exit(1)


if __name__ == "__main__":
    main()
