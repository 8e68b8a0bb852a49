"""Engines that tests build in their own process: at once, without the steps that a start takes for itself.

What a worker computes before it is ready warms its device and tells routers how long its steps take: of an
engine that answers a few requests that is most of the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from eyas.engine.loading import build

STEP_S = 0.1  # the slowest, as a start would have measured it


@contextlib.contextmanager
def unwarmed(*, timed: bool = False) -> Iterator[None]:
    """`timed`: it measures its steps all the same, for a test of what routes by them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "_warm_up", lambda *_: STEP_S))
        if not timed:
            stack.enter_context(mock.patch.object(build, "measure", lambda *_: None))
        yield
