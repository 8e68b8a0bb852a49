"""The process of one program that a model wrote: reads it from standard input, and runs it within limits.

Refused are network, other processes, and changes of files; processor time and memory have an end. The process
ends with SUCCESS behind the program's last line; a program that asks to exit before has failed, whatever its
code. This file imports the standard library alone.
"""

from __future__ import annotations

import os
import resource
import sys

SUCCESS = 42
CPU_S = 5
MEMORY_BYTES = 1 << 30
REFUSED = (
    "socket.",
    "subprocess.",
    "shutil.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.chown",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse(event: str, args: tuple[object, ...]) -> None:
    """The audit hook. Raises PermissionError for what a solution has no need of."""
    flags = args[2] if event == "open" else 0
    if event.startswith(REFUSED) or (isinstance(flags, int) and flags & WRITING):
        raise PermissionError(f"{event} is refused here")


def main() -> None:
    """Runs the program of standard input."""
    program = sys.stdin.buffer.read()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(refuse)
    try:
        exec(compile(program, "program", "exec", dont_inherit=True), {})  # without this file's __future__
    except SystemExit:
        os._exit(1)
    os._exit(SUCCESS)


if __name__ == "__main__":
    main()
