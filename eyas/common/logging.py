"""Log lines of every process: plain text on standard error, one shape."""

from __future__ import annotations

import logging


def setup(process: str) -> None:
    """Call once a process, first thing; `process` names it in each line."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
