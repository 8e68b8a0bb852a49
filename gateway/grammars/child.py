"""Finds out whether grammars can be compiled: the process `python -m gateway.grammars.child FOLDER CPU_S`.

It answers each line, a grammar as JSON, with a line: null, or why the grammar cannot be followed. What a
hostile grammar takes, it takes here: memory has a limit, and so has the time, which is that of the process
itself. So a busy machine, or a process that is stopped for a while, refuses no grammar.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import GrammarCompiler
from eyas.common.grammars.notations import Grammar
from gateway.grammars.walks import slowest_token

MEMORY_BYTES = 2 << 30  # beyond what the libraries and the vocabulary take
MASK_S = 0.01
"""The most seconds of a processor that a token may take: engines fill a mask per token, between two steps."""

_NICE = 5  # streams come first
_MOST_SAID = 300


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
