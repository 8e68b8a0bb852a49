"""A process that shares memory or sockets with a test, and that the test may kill at any moment."""

from __future__ import annotations

import subprocess
import sys
from typing import Self


class Child:
    """Runs a script with arguments (`sys.argv[1:]`). `descriptors`: those that it inherits."""

    def __init__(self, script: str, *words: int | str) -> None:
        """An int is a descriptor, under whose number the script finds it."""
        descriptors = [word for word in words if isinstance(word, int)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys\n" + script, *map(str, words)],
            pass_fds=descriptors,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def line(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
