"""A second stream, for work that needs nothing of what is launched after it began."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """One piece of work at a time beside the current stream; without a GPU it is done at once."""

    def __init__(self, *, cuda: bool) -> None:
        self._stream = torch.cuda.Stream() if cuda else None
        self.begun = False  # and not joined yet

    def begin(self, work: Callable[[], object]) -> None:
        """Launches it behind all that was launched until now."""
        self.begun = True
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """Has later launches wait for the side stream, if it was begun."""
        if self._stream is not None and self.begun:
            torch.cuda.current_stream().wait_stream(self._stream)
        self.begun = False
