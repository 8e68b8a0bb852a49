"""The process that finds out whether grammars can be compiled: `python -m gateway.grammar_child FOLDER`.

It answers each line, a grammar as JSON, with a line: null, or why the grammar cannot be followed. What a
hostile grammar takes, it takes here: memory has a limit, and who asks kills it when it takes too long.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from eyas.common.errors import InvalidRequest
from eyas.common.grammar import Grammar
from eyas.common.grammar_compiler import GrammarCompiler, library

MEMORY_BYTES = 2 << 30
MASK_S = 0.01
"""The most seconds of a processor that a mask may take: engines fill one per token, between two steps."""

_LOOKS = 24  # masks that are filled to find out
_NICE = 5  # streams come first


def main(folder: Path) -> None:
    """Answers lines until there are no more. The first answer, to none, says whether it can."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiler = GrammarCompiler(folder)
    except InvalidRequest as error:
        _say(error.message)
        return
    _say(None)
    for line in sys.stdin.buffer:
        _say(_judge(compiler, msgspec.json.decode(line, type=Grammar)))


def _judge(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    try:
        slowest = _slowest_mask(compiler.compile(grammar))
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        return "it needs too much memory to compile"
    if slowest > MASK_S:
        took, most = 1000 * slowest, 1000 * MASK_S
        return (
            f"a token takes {took:.0f} ms of a processor, and {most:.0f} ms is the most: it is too ambiguous"
        )
    return None


def _slowest_mask(compiled: Any) -> float:
    """Seconds of this thread's own time for the slowest of a few steps along an output at random."""
    matcher, pick, slowest = library().GrammarMatcher(compiled), random.Random(0), 0.0
    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), np.int32)
    for _ in range(_LOOKS):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        filled = time.thread_time() - began
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(ids):
            break
        began = time.thread_time()
        matcher.accept_token(int(pick.choice(ids)))
        slowest = max(slowest, filled + time.thread_time() - began)
        if matcher.is_terminated() or slowest > 10 * MASK_S:
            break
    return slowest


def _say(reason: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reason) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
