"""The process that finds out whether grammars can be compiled: `python -m gateway.grammar_child FOLDER`.

It answers each line, a grammar as JSON, with a line: null, or why the grammar cannot be followed. What a
hostile grammar takes, it takes here: memory has a limit, and who asks kills it when it takes too long.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.grammar import Grammar
from eyas.common.grammar_compiler import GrammarCompiler

MEMORY_BYTES = 2 << 30
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
        compiler.compile(grammar)
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        return "it needs too much memory to compile"
    return None


def _say(reason: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reason) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
