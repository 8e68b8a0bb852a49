"""Ways of models' shapes, each an engine in a process of its own: how scripts of figures run them all."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence

from tests.gpu.lines import say


def side_by_side(commands: Sequence[Sequence[str]], ends_at: float) -> list[int]:
    """Their exit codes; what has not ended in time is killed."""
    codes, processes = [], [subprocess.Popen(each) for each in commands]
    for process in processes:
        try:
            codes.append(process.wait(max(ends_at - time.monotonic(), 1.0)))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait())
    return codes


def run_ways(commands: Sequence[Sequence[str]], ends_at: float, args: argparse.Namespace) -> bool:
    """True if one has failed, as a line of `args.out` says. All kernels are compiled first (`--compile` of
    each: side by side), then one follows the other, unless `args.compile`.
    """
    ahead = [[*words, "--compile"] for words in commands if args.device != "cpu"]
    failed = any(side_by_side(ahead, ends_at))
    for words in commands if not args.compile else ():
        try:
            subprocess.run(words, check=True, timeout=max(ends_at - time.monotonic(), 1.0))
        except subprocess.SubprocessError as error:
            failed = True
            say(args.out, {"failed": str(error)[-300:]})
    return failed


def run_way(measure: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """One way of one shape, in this process, which ends if it fails: a line of `args.out` says how."""
    try:
        measure(args)
    except BaseException:
        say(args.out, {"shape": args.shapes[0], "way": args.ways[0], "failed": traceback.format_exc()})
        os._exit(1)
