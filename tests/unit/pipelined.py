"""Finds, in a kernel's TTGIR, reads of shared memory behind the copy that may overwrite it.

Triton (3.6) copies what a loop loads some turns ahead, into buffers that go round, and counts them by how
long the loop's own operations need each. It overlooks an operation within an `if` of the loop: where the
tensor cores do not read the shared memory themselves, there is one buffer too few, so that such an operation
reads the numbers of a later turn, or zeros. No interpreter sees that, and no error tells of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ALLOCATED = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
_TURN = re.compile(r"(%\w+) = ttg\.memdesc_index (%\w+)\[(%\w+)\]")
_SAME = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_COPIED = re.compile(r"ttg\.async_copy_global_to_local %\w+, (%\w+)")


def late_reads(ttgir: str) -> Iterator[str]:
    """The lines of such reads."""
    lines = [re.sub(r" loc\(.*", "", line) for line in ttgir.splitlines() if not line.startswith("#")]
    buffers = {name: int(count) for name, count in _ALLOCATED.findall("\n".join(lines))}
    for number, line in enumerate(lines):
        if " scf.for " in line:
            yield from _late_in_loop(lines, number, buffers)


def _late_in_loop(lines: list[str], loop: int, buffers: dict[str, int]) -> Iterator[str]:
    parts: dict[str, tuple[str, str]] = {}  # of each name of a part of shared memory: buffers, and turn
    copied: dict[str, str] = {}  # into which turn's buffer the loop has copied by here
    for line in _body(lines, loop):
        if found := _TURN.search(line):
            parts[found[1]] = found[2], found[3]
        elif (found := _SAME.search(line)) and found[2] in parts:
            parts[found[1]] = parts[found[2]]
        elif found := _COPIED.search(line):
            if _depth(line) == _depth(lines[loop]) + 2 and found[1] in parts:
                copied.setdefault(*parts[found[1]])
        else:
            for name in set(re.findall(r"%\w+", line.partition(" = ")[2] or line)) & parts.keys():
                memory, turn = parts[name]
                late = copied.get(memory, turn) != turn
                if late and buffers[memory] <= _ahead(lines, loop, memory):
                    yield line.strip()


def _body(lines: list[str], loop: int) -> Iterator[str]:
    for line in lines[loop + 1 :]:
        if _depth(line) <= _depth(lines[loop]):
            return
        yield line


def _ahead(lines: list[str], loop: int, memory: str) -> int:
    """Turns that are copied before the loop begins."""
    before = [line for line in lines[:loop] if _depth(line) == _depth(lines[loop])]
    return sum((found := _TURN.search(line)) is not None and found[2] == memory for line in before)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
