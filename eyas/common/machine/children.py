"""Python processes that this one starts: none takes a module from the folder that it is started in.

Python puts that folder in front of its own library for `-m` and `-c`, which multiprocessing uses: whoever can
put a `random.py` there would be run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_SAFE_PATH = "PYTHONSAFEPATH"


def python_module(module: str, *words: str) -> tuple[str, ...]:
    """The command `python -m module words`."""
    return (sys.executable, "-P", "-m", module, *words)


def import_safely() -> None:
    """Every Python process that this one starts from now on imports safely, those of libraries too."""
    os.environ[_SAFE_PATH] = "1"


@contextlib.contextmanager
def importing_safely() -> Iterator[None]:
    """Sets safe imports for processes that multiprocessing starts inside: these have no command of ours."""
    before = os.environ.get(_SAFE_PATH)
    import_safely()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
