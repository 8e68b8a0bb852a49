"""The plan of one measurement, and the flags that say it."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench import backends
from eyas.bench.datasets import DATASETS, DatasetOptions
from eyas.bench.jobs import FIRST_PLAIN_ID, LoadJob
from eyas.bench.records import LatencySlo
from eyas.common.errors import ConfigError
from eyas.flags import positive, whole

TRACE = "trace"


@dataclass(frozen=True)
class LoadPlan:
    """A load and how it is asked for. None: as the server says (`model`, `vocab_size`), or no limit."""

    dataset: str
    draw: DatasetOptions
    jobs: list[LoadJob]
    """With token ids of no vocabulary yet."""
    backend: str
    rate: float
    max_concurrency: int | None
    warmup: int
    model: str | None
    vocab_size: int | None
    temperature: float
    ignore_eos: bool
    extra: dict[str, Any]
    slo: LatencySlo | None

    def settings(self) -> dict[str, Any]:
        """The requested settings, by the names of SGLang's result lines."""
        return {
            "backend": self.backend,
            "dataset_name": self.dataset,
            "request_rate": TRACE if self.dataset == TRACE else self.rate,
            "max_concurrency": self.max_concurrency,
            "sharegpt_output_len": self.draw.fixed_output_len,
            "random_input_len": self.draw.input_len,
            "random_output_len": self.draw.output_len,
            "random_range_ratio": self.draw.range_ratio,
            "num_prompts": len(self.jobs),
            "seed": self.draw.seed,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
        }


def make_plan(args: argparse.Namespace) -> LoadPlan:
    """The plan from the flags of `add_plan`; the dataset is drawn. Raises ConfigError."""
    draw = DatasetOptions(
        count=args.num_prompts,
        seed=args.seed,
        path=args.dataset_path,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        turns=args.turns,
        agent_context=args.agent_context,
        fixed_output_len=args.sharegpt_output_len,
        context_len=args.sharegpt_context_len,
        tokenizer=args.tokenizer,
        slowdown=args.trace_slowdown,
    )
    if args.dataset_name not in DATASETS:
        problem = f"{args.dataset_name!r} is none of {', '.join(DATASETS)}"
        raise ConfigError(f"--dataset-name: {problem}", param="dataset-name")
    if args.dataset_name == TRACE and args.request_rate != float("inf"):
        problem = "a trace has times of its own: see --trace-slowdown"
        raise ConfigError(f"--request-rate: {problem}", param="request-rate")
    jobs = DATASETS[args.dataset_name].jobs(draw)
    backend = args.backend or backends.backend_for(jobs)
    backends.check(backend, jobs)
    return LoadPlan(
        dataset=args.dataset_name,
        draw=draw,
        jobs=jobs,
        backend=backend,
        rate=args.request_rate,
        max_concurrency=args.max_concurrency,
        warmup=args.warmup_requests,
        model=args.served_model,
        vocab_size=args.vocab_size,
        temperature=args.temperature,
        ignore_eos=not args.disable_ignore_eos,
        extra=args.extra_request_body,
        slo=None if args.slo is None else LatencySlo.parse(args.slo),
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The flags of a plan."""
    _add_dataset(parser)
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=rate, default=float("inf"), metavar="R", help="Poisson, per second (inf)")
    add("--max-concurrency", type=positive, metavar="N", help="requests at a time (no limit)")
    add("--seed", type=int, default=1, metavar="N", help="of everything that is drawn (1)")
    add("--warmup-requests", type=whole, default=1, metavar="N", help="sent before the clock starts (1)")
    add("--slo", metavar="ttft=T,tpot=T,e2e=T", help="bounds of a good request, like ttft=200ms,tpot=20ms")
    add = parser.add_argument_group("requests").add_argument
    add("--backend", choices=backends.BACKENDS, help="how the server is asked (sglang-oai; for texts -chat)")
    add("--served-model", metavar="ID", help="the model's name there (the first it lists)")
    add("--vocab-size", type=vocabulary, metavar="N", help="token ids are below it (as the server says)")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="(0)")
    add("--disable-ignore-eos", action="store_true", help="answers may end before their length")
    add("--extra-request-body", type=json_object, default={}, metavar="JSON", help="fields of every request")


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    draw = DatasetOptions()
    add = parser.add_argument_group("dataset").add_argument
    names = "; ".join(f"{name}: {dataset.text}" for name, dataset in DATASETS.items())
    add("--dataset-name", default="random", metavar="NAME", help=f"(random) {names}")
    add("--dataset-path", type=Path, metavar="FILE", help="its file")
    count = "how many (100; 32 of multi-turn and schema; 8 of agents; a trace has its own)"
    add("--num-prompts", type=positive, metavar="N", help=count)
    add("--random-input-len", type=positive, default=draw.input_len, metavar="N", help="longest prompt (256)")
    add("--random-output-len", type=positive, default=draw.output_len, metavar="N", help="and answer (128)")
    ratio = "shortest length as a share of the longest (0: from 1 token on; 1: all the same)"
    add("--random-range-ratio", type=share, default=draw.range_ratio, metavar="F", help=ratio)
    add("--turns", type=positive, metavar="N", help="per conversation, at most (4; agents: 80)")
    add(
        "--agent-context",
        type=positive,
        default=draw.agent_context,
        metavar="N",
        help="words at which a session of agents ends (100000)",
    )
    add("--sharegpt-output-len", type=positive, metavar="N", help="of every answer (as long as in the file)")
    add("--sharegpt-context-len", type=positive, metavar="N", help="longer pairs are left out")
    add("--tokenizer", type=Path, metavar="DIR", help="counts a file's tokens (one per 4 characters)")
    add(
        "--trace-slowdown",
        type=factor,
        default=1.0,
        metavar="F",
        help="stretches the times of a trace or of agents (1)",
    )


# --- values ------------------------------------------------------------------------------------------------


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def rate(text: str) -> float:
    """Requests per second, above 0; inf: all at once."""
    return _number(text, 1e-9, float("inf"), "a rate per second above 0, or inf")


def factor(text: str) -> float:
    """A number above 0."""
    return _number(text, 1e-9, 1e9, "a number above 0")


def temperature(text: str) -> float:
    """A number from 0 on."""
    return _number(text, 0.0, 1e9, "a number from 0 on")


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, 0.0, 1.0, "a number from 0 to 1")


def vocabulary(text: str) -> int:
    """A number of token ids that leaves some to draw."""
    size = positive(text)
    if size <= FIRST_PLAIN_ID:
        raise argparse.ArgumentTypeError(f"{text!r} is not above {FIRST_PLAIN_ID}: lower ids are special")
    return size


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
