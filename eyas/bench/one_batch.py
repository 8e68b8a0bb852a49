"""`eyas bench one-batch`: a static batch through the engine alone, without a server.

On a GPU each batch runs twice, kernel by kernel (`eager`) and with CUDA graphs (`graphs`), each way in a
process of its own. The fields of a JSON line have the names that SGLang's bench_one_batch writes, and Eyas's
own beside them. `static_batch` runs and times a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.bench.files import check_writable
from eyas.bench.lines import TablePrinter
from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError, EyasError
from eyas.common.model_name import model_name
from eyas.configuration import engine_config
from eyas.flags import add_engine, positive
from kv_transfer.backends.table import NONE

if TYPE_CHECKING:
    from eyas.bench.parts import Tell
    from eyas.bench.static_batch import Script, StaticBatch

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
    lines = TablePrinter(COLUMNS, args.output_file, show=_shown)
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
    from eyas.bench.static_batch import StaticBatch

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

    from eyas.bench.static_batch import ScriptLink
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

    head_dim = read_model(config.model, config.load_format).head_dim
    try:
        Fa3Build(getattr(torch, config.dtype), head_dim, config.device).wait()
    except ConfigError as error:
        print(f"eyas: {error.message}", file=sys.stderr)  # the engine then takes the triton kernel


def script(plan: BatchPlan, vocab_size: int, constant: dict[str, Any], tell: Tell) -> Script:
    """Every batch in turn; one that fails is told with its `error`, and the next one follows."""
    from eyas.bench.static_batch import figures, repeat

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
        "draft": model_name(config.draft) if config.draft else None,
    }
    if config.speculates:
        spec = config.speculation
        facts |= {"spec_steps": spec.steps, "spec_topk": spec.topk, "spec_draft_tokens": spec.width}
        facts |= {"spec_ngram": spec.ngram, "synthetic": bool(spec.synthetic_rates)}
    return facts


def _shown(name: str, value: Any) -> str:
    """Seconds of the JSON line as milliseconds."""
    if isinstance(value, float):
        if name.endswith("latency"):
            return f"{1e3 * value:.2f}"
        return f"{value:.2f}" if name == "accept_length" else f"{value:,.0f}"
    return str(value)
