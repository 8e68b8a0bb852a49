"""The named cases of `eyas bench suite`: what is sent in each measurement, and to which clusters of its own.

Cases are pure values from a seed, so that two servers are measured with the same requests: token ids are of
no vocabulary yet.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench.agents import agent_sessions
from eyas.bench.jobs import JobTurn, LoadJob, draw_ids, poisson
from eyas.bench.shapes import SHAPES, write_head, write_model
from eyas.common.config import NANO, ServeConfig
from eyas.common.errors import ConfigError
from eyas.common.model_folder import model_name
from eyas.configuration import OF_DRAFTS, own_config, usual_layout

CLOSED = {"bs1": (1, 256, 512, 2), "bs8": (8, 256, 512, 8), "bs32": (32, 256, 512, 32)}
POISSON = {"s1k": 1024, "s8k": 8192}  # longest prompt
POISSON_RATE = 16.0  # requests per second
OPEN_REQUESTS = 200
LONGEST_ANSWER = 1024
FEWEST_CHATS = 32
CASES = {
    "bs1 bs8 bs32": "1, 8 or 32 requests at once; 256 tokens in, 512 out",
    "s1k s8k": f"{OPEN_REQUESTS} requests, {POISSON_RATE:g} per second; at most 1,024 or 8,192 tokens in",
    "inf1k": "the requests of s1k, all at once",
    "chatC": "C chats at once, temperature 0, to their end: chat1 chat8 ...",
    "agentsC": "C sessions of agents at once, of 600 words and 12 turns at most: agents4 ...",
    "CxIxOxN": "C at once, I tokens in, O out, N requests: 4x128x64x16 ...",
}
CHATS = (
    "What is the capital of France?",
    "Tom has 12 apples and buys 7 more. How many apples does Tom have?",
    "List three fruits.",
    "How many centimeters are there in 3 meters?",
    "Which country has Tokyo as its capital?",
    "A box holds 8 pens. How many pens are in 6 boxes?",
    "Hello! How are you today?",
    "Write a Python function that adds two numbers.",
)
SMALL_AGENTS = (600, 12, 0.02)  # words, turns, and the pace of their times to think
ON_CPU = ("chat1", "chat8", "bs1", "bs8", "agents4")
ON_GPU = ("bs1", "bs8", "bs32", "s1k", "s8k")
SHAPE = "llama-3.1-8b"
MAKE_SHAPE = f"python -m eyas.bench.shapes {SHAPE} M8 --head H8"
UNSAID = ("help", "api_key", "report", "commit", "output_file")  # a key is a secret
CHAIN = {"spec_steps": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
CHAIN_FLAGS = "--spec-steps 3 --rejection-sample-method synthetic --synthetic-acceptance-length 3.0"


@dataclass(frozen=True)
class LoadCase:
    """A named set of jobs, at most `concurrency` at once; `rate`: Poisson arrivals per second, if any."""

    name: str
    jobs: tuple[LoadJob, ...]
    concurrency: int
    rate: float | None = None


def make_case(name: str, seed: int = 1) -> LoadCase:
    """One of CASES, by name. Raises ConfigError for anything else."""
    rng = random.Random(seed)
    if name in POISSON or name == "inf1k":
        return _open(name, rng)
    if chat := re.fullmatch(r"chat([1-9]\d*)", name):
        concurrency = int(chat[1])
        prompts = itertools.islice(itertools.cycle(CHATS), max(concurrency * 4, FEWEST_CHATS))
        return LoadCase(
            name, tuple(LoadJob((JobTurn(prompt, 128),), may_stop=True) for prompt in prompts), concurrency
        )
    if agents := re.fullmatch(r"agents([1-9]\d*)", name):
        jobs_of_agents = agent_sessions(int(agents[1]), *SMALL_AGENTS, seed)
        return LoadCase(name, tuple(jobs_of_agents), len(jobs_of_agents))
    if shape := re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", name):
        concurrency, prompt, answer, count = map(int, shape.groups())
    elif name in CLOSED:
        concurrency, prompt, answer, count = CLOSED[name]
    else:
        raise ConfigError(f"CASE: {name!r} is none of {' '.join(CASES)}", param="CASE")
    if 0 in (concurrency, prompt, answer, count):
        raise ConfigError(f"CASE: {name!r} has a zero", param="CASE")
    jobs = (LoadJob.single(draw_ids(rng, prompt), answer) for _ in range(count))
    return LoadCase(name, tuple(jobs), concurrency)


def _open(name: str, rng: random.Random) -> LoadCase:
    """Draws a prompt's length, its ids, the answer's length, and again; then every arrival.

    This order is part of the case: figures of other servers were measured with it.
    """
    longest = POISSON.get(name, 1024)
    turns = [
        (draw_ids(rng, rng.randint(1, longest)), rng.randint(1, LONGEST_ANSWER)) for _ in range(OPEN_REQUESTS)
    ]
    rate = None if name == "inf1k" else POISSON_RATE
    dues = poisson(rng, rate or float("inf"))
    jobs = (LoadJob.single(ids, answer, due) for (ids, answer), due in zip(turns, dues, strict=False))
    return LoadCase(name, tuple(jobs), OPEN_REQUESTS, rate)


@dataclass(frozen=True)
class ClusterSetup:
    """A cluster to measure. `drafts`: with them, without them, or both, one after the other.

    `command`: measures it alone, with the same cases.
    """

    title: str
    config: ServeConfig
    drafts: tuple[bool, ...]
    command: str


def cases_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the names of the requested cases; without a request, of the device's usual cases."""
    return tuple(args.cases) or (ON_GPU if args.device == "cuda" else ON_CPU)


def command_line(args: argparse.Namespace) -> str:
    """The command again, from its flags, without those that say where results go."""
    words = ["eyas bench suite", *args.cases]
    for action in args.parser._actions:
        value = getattr(args, action.dest, None)
        if (
            not action.option_strings
            or action.dest in UNSAID
            or value == args.parser.get_default(action.dest)
        ):
            continue
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        if isinstance(value, tuple) and not action.nargs:
            values = [",".join(map(str, value))]
        words += [max(action.option_strings, key=len), *(shlex.quote(str(word)) for word in values)]
    return " ".join(words)


def gpus(args: argparse.Namespace) -> int:
    """The number of GPUs of the cluster of these flags."""
    if args.gpus:
        return len(set(args.gpus))
    layout, usual = usual_layout(args)
    split = (args.prefill or 1) + (args.decode or 1)
    workers: int = split if layout == "split" else args.workers or usual
    ranks: int = args.tensor_parallel_size
    return workers * ranks


def setups(args: argparse.Namespace, folder: Path) -> Iterator[ClusterSetup]:
    """The clusters, to be measured one after the other.

    With --model, the one that the flags describe. Without it, on a CPU the embedded model's; on a GPU those
    of the README's table: an 8B model's shape in `folder`, plain, then with drafted chains.
    """
    if args.model is None and args.device == "cuda":
        yield from _shapes(args, folder)
        return
    both = args.both or not (args.cases or args.model)
    given = _with(args, model=args.model or str(NANO))
    title = "The embedded model" if args.model is None else model_name(args.model)
    config = own_config(given)
    yield ClusterSetup(
        f"{title}, {config.layout} layout", config, (True, False) if both else (True,), command_line(args)
    )


def _shapes(args: argparse.Namespace, folder: Path) -> Iterator[ClusterSetup]:
    model, head = folder / "M8", folder / "H8"
    write_model(SHAPES[SHAPE], model)
    write_head(SHAPES[SHAPE], head)
    made = {"model": str(model), "load_format": "dummy"}
    command = f"{command_line(_with(args, cases=cases_of(args)))} --model M8 --load-format dummy"
    unasked = {name: args.parser.get_default(name) for name in OF_DRAFTS}
    plain = own_config(_with(args, **made, **unasked, draft="none"))
    yield ClusterSetup(f"{SHAPE}'s shape, plain", plain, (True,), f"{command} --draft none")
    chain = own_config(_with(args, **made, draft=str(head), **CHAIN))
    title = f"{SHAPE}'s shape, EAGLE-3 chains of 3, 3.0 tokens per round by chance"
    yield ClusterSetup(title, chain, (True,), f"{command} --draft H8 {CHAIN_FLAGS}")


def _with(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **changes})
