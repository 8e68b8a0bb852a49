"""Graphs of steps whose model's code is another's: recorded if it lets itself be recorded, else there are
none, and the log says so.

A graph holds launches alone. Code that waits for the device, to look at a value, cannot be in one; that is
found by a step that forbids it, before a recording is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.step import StepShape

_log = logging.getLogger("eyas.engine")


def capture_if_possible(executor: StepExecutor, shapes: Sequence[StepShape]) -> None:
    """Records a graph for each shape, or none."""
    if not shapes:
        return
    before = torch.cuda.current_stream()
    try:
        torch.cuda.set_sync_debug_mode("error")
        try:
            executor.rehearse_forward(shapes[-1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        executor.capture(shapes, ())
    except RuntimeError as error:
        torch.cuda.set_stream(before)
        executor.forget_graphs()
        why = str(error).strip().splitlines()[0]
        _log.warning(
            "steps run without CUDA graphs: the model's code in transformers waits for the GPU (%s)", why
        )
