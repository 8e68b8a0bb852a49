"""The clusters that a suite of cases measures by itself, and the cases of each."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench.shapes import SHAPES, write_head, write_model
from eyas.common.config import NANO, ServeConfig
from eyas.common.model_name import model_name
from eyas.configuration import OF_DRAFTS, own_config, usual_layout

ON_CPU = ("chat1", "chat8", "bs1", "bs8")
ON_GPU = ("bs1", "bs8", "bs32", "s1k", "s8k")
SHAPE = "llama-3.1-8b"
MAKE_SHAPE = f"python -m eyas.bench.shapes {SHAPE} M8 --head H8"
UNSAID = ("help", "api_key", "report", "commit", "output_file")  # a key is a secret
CHAIN = {"spec_steps": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
CHAIN_FLAGS = "--spec-steps 3 --rejection-sample-method synthetic --synthetic-acceptance-length 3.0"


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
