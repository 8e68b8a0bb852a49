"""One model on one GPU and on two: are the logits the same, how long is a step, and what if a rank dies?

    python -m tests.gpu.tp_check --out DIR --model DIR [--deepseek LAYERS]

Each number of ranks runs in a process of its own, by the engine itself, with dummy weights of the same seed.
Writes DIR/tp.json; a model folder that does not exist is made, of Llama-3.1-8B's sizes, or of DeepSeek-V3's
with fewer layers: three dense ones first (8 of them fit one H200).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from eyas.bench.shapes import SHAPES, write_model
from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.device.step import StepInput
from eyas.engine.ipc.messages import Event, StepReply
from eyas.engine.loading.startup import EngineStart
from tests.gpu.answer_latent import write_whole
from tests.unit.loopback import Loopback, Worker, wait_all

RANKS = (1, 2)
PROMPTS, PROMPT, FORCED = 4, 300, 4  # logits are compared after this many prompts, and at given tokens
BATCHES = (1, 32, 96)
INPUT, OUTPUT = 256, 128
PAGES = 4096  # of 16 tokens
LIMIT_S = 120.0  # of one process
NOTICED_S = 30.0  # a dead follower, at most

BEGAN = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f}]", *words, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--deepseek", type=int, metavar="LAYERS")
    parser.add_argument("--ranks", type=int, help="measure this many, in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.ranks is not None:
        measure(config_of(args.model, args.ranks), args.out)
        return
    if not args.model.exists() and args.deepseek:
        write_whole(args.model, args.deepseek)
    elif not args.model.exists():
        write_model(SHAPES["llama-3.1-8b"], args.model)
    reports = {ranks: _in_a_process(ranks, args.out, args.model) for ranks in RANKS}
    errors = relative_errors(*(torch.load(logits_of(args.out, ranks)) for ranks in RANKS))
    report = {"relative errors of logits": errors, "ranks": reports}
    (args.out / "tp.json").write_text(json.dumps(report, indent=1))
    say("relative errors of logits, after each prompt and each token after it:")
    for row in errors:
        say("  ", *row)


def config_of(model: Path, ranks: int) -> EngineConfig:
    return resolve_engine(
        "cuda",
        model=str(model),
        load_format="dummy",
        worker="tp",
        draft=None,
        tensor_parallel_size=ranks,
        prefill_attention_backend="triton",
        context_length=4096,
        mixed_tokens=0,
        cuda_graph_bs=BATCHES,
        num_pages=PAGES,
    )


def logits_of(out: Path, ranks: int) -> Path:
    return out / f"logits{ranks}.pt"


def relative_errors(one: torch.Tensor, several: torch.Tensor) -> list[list[float]]:
    """Norm of the difference over the norm, for each of [prompts, tokens, vocab]."""
    errors = (several - one).norm(dim=-1) / one.norm(dim=-1)
    return [[round(error, 5) for error in row] for row in errors.tolist()]


def _in_a_process(ranks: int, out: Path, model: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.gpu.tp_check", "--out", out, "--model", model, "--ranks", ranks]
    subprocess.run([str(word) for word in command], check=True, timeout=LIMIT_S)
    return json.loads((out / f"ranks{ranks}.json").read_text())


def measure(config: EngineConfig, out: Path) -> None:
    """Everything about one number of ranks; ends the process, whose device may hang by then."""
    ranks = config.tensor_parallel_size
    say(f"{ranks} ranks: compiling")
    EngineStart.of(config).wait_for_kernels()
    say(f"{ranks} ranks: loading")
    engine = Timed(config)
    report: dict[str, object] = {"ready s": round(time.monotonic() - BEGAN, 1)}
    say(f"{ranks} ranks: ready, {engine.worker.ready.pages_total} pages")
    torch.save(engine.forced_logits(), logits_of(out, ranks))
    for batch in BATCHES:
        engine.tpot_ms(f"warm{batch}", batch)
        report[f"TPOT ms bs{batch}"] = tpot = engine.tpot_ms(f"timed{batch}", batch)
        say(f"{ranks} ranks: TPOT {tpot} ms at bs{batch}")
    if ranks > 1:
        report["a killed follower"] = words = engine.lose_a_follower()
        say(words)
    (out / f"ranks{ranks}.json").write_text(json.dumps(report))
    os._exit(0)


class Timed(Loopback):
    """An engine whose tokens' times are noted, and whose logits are looked at."""

    def __init__(self, config: EngineConfig) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._random = random.Random(1)
        super().__init__(config)
        (self.worker,) = self.workers.values()
        while self.worker.ready is None:
            time.sleep(0.01)

    def event(self, worker: Worker, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, StepReply):
            for entry in event.entries:
                self._first.setdefault(entry.id, now)
                self._last[entry.id] = now
        super().event(worker, event)

    def forced_logits(self) -> torch.Tensor:
        """Float32 [prompts, tokens, vocab] of answers whose tokens are given: those after the prompt's end
        come from the wide path, the others from the narrow one.
        """
        executor, seen = self.worker.engine._parts.runner._executor, []
        finish = executor.finish

        def watched(step: StepInput) -> Any:
            if step.shape.sampled:
                seen.append(executor._program.logits[0].float().cpu())
            return finish(step)

        executor.finish = watched
        for i in range(PROMPTS):
            params = SamplingParams(
                temperature=0.0, max_tokens=FORCED, ignore_eos=True, logit_bias={42: 100.0}
            )
            wait_all([self.submit(self._request(f"forced{i}", PROMPT, params), split=False)], LIMIT_S)
        executor.finish = finish
        return torch.stack(seen).view(PROMPTS, FORCED, -1)

    def tpot_ms(self, name: str, batch: int) -> float:
        """Median over the requests of the time of a token after the first."""
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        requests = [self._request(f"{name}-{i}", INPUT, params) for i in range(batch)]
        wait_all([self.submit(request, split=False) for request in requests], LIMIT_S)
        spans = [self._last[request.id] - self._first[request.id] for request in requests]
        return round(1e3 * statistics.median(spans) / (OUTPUT - 1), 3)

    def lose_a_follower(self) -> str:
        """Kills one in the middle of an answer; what the engine says, and how soon."""
        failures: list[str] = []
        threading.excepthook = lambda failed: failures.append(str(failed.exc_value))
        params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
        self.submit(self._request("lost", INPUT, params), split=False)
        time.sleep(1.0)
        children = psutil.Process().children()
        victims = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        began = time.monotonic()
        victims[0].send_signal(signal.SIGKILL)
        self.worker.thread.join(NOTICED_S)
        return f"after {time.monotonic() - began:.2f} s: {failures or 'nothing was noticed'}"

    def _request(self, name: str, tokens: int, params: SamplingParams) -> GenerationRequest:
        ids = [self._random.randrange(10, self.worker.ready.vocab_size) for _ in range(tokens)]
        return GenerationRequest(name, tuple(ids), params)


if __name__ == "__main__":
    main()
