"""`eyas bench one-batch`: a static batch through the engine alone, without a server.

On a GPU each batch runs twice, kernel by kernel (`eager`) and with CUDA graphs (`graphs`), each way in a
process of its own. The fields of a JSON line have the names that SGLang's bench_one_batch writes, and Eyas's
own beside them. No server and no wire, but the real loop and scheduler: a script on the engine's own thread
submits a batch, and gets its trace when all of it has ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from eyas.bench.output import TablePrinter, check_writable
from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError, EyasError
from eyas.common.model_folder import model_name
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenEntry
from eyas.configuration import engine_config
from eyas.engine.ipc.messages import (
    Command,
    EngineReady,
    Event,
    PagesLost,
    RequestFailed,
    RequestRejected,
    ShutdownEngine,
    StepReply,
    SubmitGeneration,
)
from eyas.flags import add_engine, positive
from kv_transfer.backends.table import NONE

if TYPE_CHECKING:
    from eyas.bench.parts import Tell

EAGER, GRAPHS = "eager", "graphs"
PROFILED_TOKENS = 16  # per request, so that a trace can still be looked at
COLUMNS = {
    "mode": "mode",
    "batch": "batch_size",
    "in": "input_len",
    "out": "output_len",
    "prefill ms": "prefill_latency",
    "tok/s": "prefill_throughput",
    "step p50 ms": "median_decode_latency",
    "p90 ms": "p90_decode_latency",
    "tok/step": "accept_length",
    "decode tok/s": "median_decode_throughput",
    "overall tok/s": "overall_throughput",
}
BATCH_S = 300.0  # a batch that takes longer is given up
PAUSE_S = 0.05  # between batches: the step that was launched ahead of the last one's end lands meanwhile
RUNS, RUNS_S = 4, 5.0  # the most runs of a batch, and the seconds within which they begin


@dataclass(frozen=True)
class BatchPlan:
    """The plan of a measurement, in every mode. `profile`: a file for a trace of the last batch."""

    batches: tuple[StaticBatch, ...]
    run_name: str
    profile: Path | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench one-batch`."""
    add = parser.add_argument_group("batches").add_argument
    add("--batch-size", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="(1 8 32)")
    add("--input-len", type=positive, nargs="+", default=[256], metavar="N", help="prompt tokens (256)")
    add("--output-len", type=positive, nargs="+", default=[128], metavar="N", help="tokens to come (128)")
    add("--run-name", default="default", metavar="NAME", help="stands in every line (default)")
    add("--output-file", type=Path, metavar="FILE", help="appends a JSON line per batch and mode")
    add("--profile", type=Path, metavar="FILE", help="a chrome trace of the last batch, by torch.profiler")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table; 1 if anything failed."""
    from eyas.bench.fits import check
    from eyas.bench.parts import ChildPart, run_parts

    plan = plan_of(args)
    largest = max(batch.size for batch in plan.batches)
    config = config_for(args, largest)
    check(config)
    check_writable("profile", plan.profile)
    lines = TablePrinter(COLUMNS, args.output_file, show=shown)
    modes = list(modes_of(config))
    parts = []
    for mode, chosen in modes:
        # The trace is of the way that serves.
        last = dataclasses.replace(plan, profile=plan.profile if mode == modes[-1][0] else None)
        parts.append(ChildPart(f"one-batch ({mode})", functools.partial(measure, chosen, last, mode)))
    failed = run_parts(parts, lines.tell)
    return int(bool(failed or lines.failed))


def plan_of(args: argparse.Namespace) -> BatchPlan:
    """Every batch size with every input and output length."""
    batches = tuple(
        StaticBatch(size, input_len, output_len)
        for size in args.batch_size
        for input_len in args.input_len
        for output_len in args.output_len
    )
    return BatchPlan(batches, args.run_name, args.profile)


def config_for(args: argparse.Namespace, largest: int) -> EngineConfig:
    """The engine's configuration, with room for batches of `largest` requests where no flag says how many.

    Prompts that wait while others decode already are computed in steps as large as alone, unless a flag says
    otherwise: here no answer suffers by it. Raises ConfigError for flags that leave too little room.
    """
    given = argparse.Namespace(**vars(args))
    given.max_running = args.max_running or largest
    given.mixed_tokens = args.mixed_tokens or 0
    config = engine_config(given)
    if config.max_running < largest:
        message = (
            f"--max-running: {config.max_running} sequences per step are fewer than a batch of {largest}"
        )
        raise ConfigError(message, param="max-running")
    waiting = max(config.max_waiting, largest)
    return dataclasses.replace(config, worker="one-batch", max_waiting=waiting, transfer=NONE)


def modes_of(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """The ways to launch a step: kernel by kernel, and with graphs where the configuration has any."""
    yield EAGER, dataclasses.replace(config, cuda_graph_max_bs=0, cuda_graph_bs=())
    if config.cuda_graph_max_bs:
        yield GRAPHS, config


def measure(config: EngineConfig, plan: BatchPlan, mode: str, tell: Tell) -> None:
    """Builds the engine, runs the plan's batches, and tells a line for each. In the process of a part."""
    from eyas.bench.fits import check_memory
    from eyas.engine.loading.startup import EngineStart

    start = EngineStart.of(config)
    import torch

    from eyas.engine.loading.build import build_engine

    torch.set_num_threads(config.threads)
    check_memory(config)
    build_prompt_kernels(config)
    constant = {"run_name": plan.run_name, "mode": mode} | about(config)
    link = ScriptLink(lambda ready: script(plan, ready.vocab_size, constant, tell))
    build_engine(config, link, start).run()


def build_prompt_kernels(config: EngineConfig) -> None:
    """Waits until FA3 is built, if prompts want it: the engine's own build then finds it, and is quick."""
    if config.prefill_attention_backend != "flashinfer":
        return
    import torch

    from eyas.engine.attention.flashinfer_backend import Fa3Build
    from eyas.engine.models.table import read_model

    head_dim = read_model(config.model, config.load_format, impl=config.model_impl).head_dim
    try:
        Fa3Build(getattr(torch, config.dtype), head_dim, config.device).wait()
    except ConfigError as error:
        print(f"eyas: {error.message}", file=sys.stderr)  # the engine then takes the triton kernel


def script(plan: BatchPlan, vocab_size: int, constant: dict[str, Any], tell: Tell) -> Script:
    """Every batch in turn; one that fails is reported with its `error`, and the next one follows."""
    for batch in plan.batches:
        try:
            traces = yield from repeat(batch, vocab_size)
        except EyasError as error:
            tell(constant | {"batch": batch.name, "error": error.message})
            continue
        tell(constant | figures(batch, traces))
    if plan.profile:
        yield from profiled(plan.batches[-1], vocab_size, plan.profile)


def profiled(batch: StaticBatch, vocab_size: int, file: Path) -> Script:
    """Runs a short batch under torch's profiler and writes what it saw as a chrome trace."""
    import torch
    from torch.profiler import profile

    short = dataclasses.replace(batch, output_len=min(batch.output_len, PROFILED_TOKENS))
    with profile() as seen:  # on the engine's own thread, as everything here
        yield short.requests(vocab_size, "profiled")
    seen.export_chrome_trace(str(file))
    sort = "self_cuda_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=sort, row_limit=15), flush=True)


def about(config: EngineConfig) -> dict[str, Any]:
    """The fields of a line that describe the engine."""
    import torch

    facts: dict[str, Any] = {
        "model": model_name(config.model),
        "device": "cpu" if config.device == "cpu" else torch.cuda.get_device_name(config.device),
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "load_format": config.load_format,
        "model_impl": config.model_impl,
        "draft": model_name(config.draft) if config.draft else None,
    }
    if config.speculates:
        spec = config.speculation
        facts |= {"spec_steps": spec.steps, "spec_topk": spec.topk, "spec_draft_tokens": spec.width}
        facts |= {"spec_ngram": spec.ngram, "spec_suffix": spec.suffix}
        facts |= {"synthetic": bool(spec.synthetic_rates)}
    return facts


def shown(name: str, value: Any) -> str:
    """Seconds of the JSON line as milliseconds."""
    if isinstance(value, float):
        if name.endswith("latency"):
            return f"{1e3 * value:.2f}"
        return f"{value:.2f}" if name == "accept_length" else f"{value:,.0f}"
    return str(value)


@dataclass(frozen=True)
class StaticBatch:
    """`size` requests of `input_len` prompt tokens, and `output_len` tokens to come for each."""

    size: int
    input_len: int
    output_len: int

    @property
    def name(self) -> str:
        """The name for people."""
        return f"batch of {self.size} x {self.input_len} + {self.output_len}"

    def requests(self, vocab_size: int, seed: str) -> list[GenerationRequest]:
        """Greedy, of random prompts that no earlier seed had: nothing of them is in a prefix cache."""
        params = SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True)
        requests = []
        for i in range(self.size):
            draw = random.Random(f"{seed} {self.size} {self.input_len} {i}")
            prompt = tuple(draw.randrange(vocab_size) for _ in range(self.input_len))
            requests.append(GenerationRequest(f"{seed} {i}", prompt, params, timeout_s=BATCH_S))
        return requests


@dataclass
class BatchTrace:
    """The times of an engine's messages about `size` requests, in seconds of the same clock as `began`.

    `steps`: the entries of each message. `failures`: of requests that did not end in tokens.
    """

    size: int
    began: float
    steps: list[tuple[float, tuple[TokenEntry, ...]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    finished: int = 0

    @property
    def over(self) -> bool:
        """True if every request has ended."""
        return self.finished + len(self.failures) == self.size

    def add(self, now: float, entries: tuple[TokenEntry, ...]) -> None:
        """Adds one message."""
        self.steps.append((now, entries))
        self.finished += sum(entry.finish is not None for entry in entries)

    @property
    def prefill_s(self) -> float:
        """Seconds until the last request had its first token."""
        return max(at for at, entries in self.steps if any(e.index == 0 for e in entries)) - self.began

    @property
    def total_s(self) -> float:
        """Seconds until the last token."""
        return self.steps[-1][0] - self.began

    def rounds(self) -> list[tuple[float, float]]:
        """(seconds, tokens per request) of each step in which all requests decode, but for their last ones.

        A step's time is that between two messages which both have tokens for every request.
        """
        rounds = []
        for (before, first), (after, entries) in zip(self.steps, self.steps[1:], strict=False):
            together = len(first) == len(entries) == self.size and all(e.index > 0 for e in entries)
            if together and not any(e.finish for e in entries):
                tokens = sum(len(e.tokens) for e in entries) / self.size
                rounds.append((after - before, tokens))
        return rounds


Script: TypeAlias = Generator[list[GenerationRequest], BatchTrace, None]


class ScriptLink:
    """The engine's link to a script, which begins when the engine is ready and ends it."""

    def __init__(self, script: Callable[[EngineReady], Script]) -> None:
        self._begin = script
        self._script: Script | None = None
        self._trace: BatchTrace | None = None
        self._rest_until = 0.0

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        """Lets the engine work, or rest; then what the script wants next."""
        now = time.perf_counter()
        trace = self._trace
        if trace is not None and not trace.over and now - trace.began > BATCH_S:
            raise EyasError(f"a batch of {trace.size} did not end within {BATCH_S:g} s")
        if (trace is not None and not trace.over) or now < self._rest_until:
            time.sleep(timeout_s)
            return []
        return self._next()

    def _next(self) -> list[Command]:
        assert self._script is not None, "the engine says first of all that it is ready"
        try:
            # A generator that has not begun takes None alone.
            requests = next(self._script) if self._trace is None else self._script.send(self._trace)
        except StopIteration:
            return [ShutdownEngine()]
        self._trace = BatchTrace(len(requests), time.perf_counter())
        return [SubmitGeneration(request, attempt=1, attach=False) for request in requests]

    def send(self, events: Sequence[Event]) -> None:
        """Notes what was said of the requests, and when."""
        now, trace = time.perf_counter(), self._trace
        if trace is None or trace.over:
            ready = next((event for event in events if isinstance(event, EngineReady)), None)
            self._script = self._begin(ready) if ready else self._script
            return
        for event in events:
            if isinstance(event, StepReply):
                trace.add(now, event.entries)
            elif isinstance(event, RequestRejected | RequestFailed):
                trace.failures.append(event.failure.message)
            elif isinstance(event, PagesLost):
                trace.failures.append("the engine lost the request")
        if trace.over:
            self._rest_until = now + PAUSE_S


def repeat(
    batch: StaticBatch, vocab_size: int
) -> Generator[list[GenerationRequest], BatchTrace, list[BatchTrace]]:
    """Runs a batch a few times, for as long as that is quick; the first run warms up if there are others.

    Raises EyasError for a batch that failed, or that never ran together.
    """
    traces: list[BatchTrace] = []
    began = time.perf_counter()
    while len(traces) < RUNS and (not traces or time.perf_counter() - began < RUNS_S):
        trace = yield batch.requests(vocab_size, f"run {len(traces)}")
        if trace.failures:
            raise EyasError(f"{len(trace.failures)} of {batch.size} requests failed: {trace.failures[0]}")
        traces.append(trace)
    traces = traces[1:] or traces
    if batch.output_len > 2 and not any(trace.rounds() for trace in traces):
        reason = "the KV pages (--num-pages) or --max-running do not hold all of it"
        raise EyasError(f"it never decoded all at once: {reason}, or its answers are too short")
    return traces


def figures(batch: StaticBatch, traces: Sequence[BatchTrace]) -> dict[str, float | int]:
    """Latencies in seconds, throughputs in tokens per second; of several runs the medians.

    Decode latencies are those of the steps in which all requests decode; there are none for answers of one
    token. `accept_length`: tokens per request and step.
    """
    prefill = statistics.median(trace.prefill_s for trace in traces)
    total = statistics.median(trace.total_s for trace in traces)
    line: dict[str, float | int] = {
        "batch_size": batch.size,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "prefill_latency": prefill,
        "prefill_throughput": batch.size * batch.input_len / prefill,
    }
    rounds = [one for trace in traces for one in trace.rounds()]
    if rounds:
        seconds = sorted(one[0] for one in rounds)
        accepted = statistics.mean(one[1] for one in rounds)
        median = statistics.median(seconds)
        line |= {
            "median_decode_latency": median,
            "p90_decode_latency": seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
            "median_decode_throughput": batch.size * accepted / median,
            "accept_length": accepted,
            "decode_steps": len(seconds),
        }
    lengths = batch.size * (batch.input_len + batch.output_len)
    return line | {"total_latency": total, "overall_throughput": lengths / total, "runs": len(traces)}
