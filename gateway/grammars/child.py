"""Finds out whether grammars can be compiled: the process `python -m gateway.grammars.child FOLDER CPU_S`.

It answers each line, a grammar as JSON, with a line: null, or why the grammar cannot be followed. What a
hostile grammar takes, it takes here: memory has a limit, and so has the time, which is that of the process
itself. So a busy machine, or a process that is stopped for a while, refuses no grammar.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar

MEMORY_BYTES = 2 << 30  # beyond what the libraries and the vocabulary take
MASK_S = 0.01
"""The most seconds of a processor that a token may take: engines fill a mask per token, between two steps."""

_NICE = 5  # streams come first
_MOST_SAID = 300


WALK_S = 0.3  # seconds of a processor after which a walk ends: it has found nothing
_LOOKS = 768  # tokens of a walk at most
_SAMPLE = 16  # of the tokens that are allowed, among which a far walk takes the longest

Pick = Callable[[np.ndarray], int]


# Walks through a compiled grammar, to find out what a token costs that an engine follows. Time is the
# thread's own, and a slow call counts as its faster one of two: a busy machine makes no grammar slow. No walk
# finds every trap: an engine has a budget for each of its sequences besides.
def slowest_token(compiled: Any, lengths: Sequence[int], most: float) -> float:
    """Seconds for the slowest token along outputs of several kinds. It stops at one that takes over `most`.

    One goes at random, as a text does. One takes long tokens, and so comes far into what a pattern repeats.
    `lengths`: bytes that each id writes.
    """
    rng, slowest = random.Random(0), 0.0

    def any_one(ids: np.ndarray) -> int:
        return int(rng.choice(ids))

    def a_long_one(ids: np.ndarray) -> int:
        return max((int(rng.choice(ids)) for _ in range(_SAMPLE)), key=lengths.__getitem__)

    for pick in (any_one, a_long_one):
        slowest = max(slowest, _walk(compiled, pick, most))
        if slowest > most:
            break
    return slowest


def _walk(compiled: Any, pick: Pick, most: float) -> float:
    """The slowest token of one output; it ends with it, or once it has found a slow one."""
    matcher, slowest = library().GrammarMatcher(compiled), 0.0
    ends = set(matcher.stop_token_ids)
    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), np.int32)
    until = time.thread_time() + WALK_S
    for _ in range(_LOOKS):
        took = _faster(most, lambda: matcher.fill_next_token_bitmask(mask, 0))
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ids = ids[~np.isin(ids, list(ends))]
        if not len(ids):
            break
        accept = partial(matcher.accept_token, pick(ids))
        took += _faster(most, accept, lambda: matcher.rollback(1))
        slowest = max(slowest, took)
        if matcher.is_terminated() or slowest > most or time.thread_time() > until:
            break
    return slowest


def _faster(most: float, call: Callable[[], Any], undo: Callable[[], Any] = lambda: None) -> float:
    """Seconds of one call; if these are over `most`, the fewer of two."""
    seconds = _seconds(call)
    if seconds > most:
        undo()
        seconds = min(seconds, _seconds(call))
    return seconds


def _seconds(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main(folder: Path, cpu_s: float) -> None:
    """Answers lines until there are no more. The first answer, to none, says whether it can.

    A grammar that takes more than `cpu_s` seconds of a processor to compile ends the process by SIGPROF.
    """
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        compiler = GrammarCompiler(folder)
    except InvalidRequest as error:
        _say(error.message)
        return
    except Exception as error:  # the library's: another release of it, or of what it needs
        _say(f"the library that compiles grammars cannot be used here: {error!r}"[:_MOST_SAID])
        return
    most = psutil.Process().memory_info().vms + MEMORY_BYTES  # threads' stacks are much on large machines
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _say(None)
    lengths = [len(piece) for piece in compiler.pieces]
    for line in sys.stdin.buffer:
        _say(_judge(compiler, lengths, msgspec.json.decode(line, type=Grammar), cpu_s))


def _judge(compiler: GrammarCompiler, lengths: Sequence[int], grammar: Grammar, cpu_s: float) -> str | None:
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        compiled = compiler.compile(grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = slowest_token(compiled, lengths, MASK_S)
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        return "it needs too much memory to compile"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if slowest > MASK_S:
        took, most = 1000 * slowest, 1000 * MASK_S
        return (
            f"a token takes {took:.0f} ms of a processor, and {most:.0f} ms is the most: it is too ambiguous"
        )
    return None


def _say(reason: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reason) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
