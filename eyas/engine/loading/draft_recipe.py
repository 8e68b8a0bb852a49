"""Every kernel that a draft worker of this configuration launches, as a recipe of `kernels.launch.warm`.

As in `eyas.engine.loading.recipe` the worker itself is the list: its head is put together on the device
"meta", and batches of every size go through its program.
"""

from __future__ import annotations

import dataclasses

import torch

from eyas.common.config import EngineConfig
from eyas.engine.device.buckets import default_batches
from eyas.engine.loading.draft_build import batch_sizes, draft_state
from eyas.engine.loading.recipe import MetaSpec
from eyas.engine.speculation.draft_worker.device_runner import BatchLayout, BatchMemory, BatchProgram


@torch.inference_mode()
def launches(config: EngineConfig) -> None:
    """Launches what a draft worker with `config`, for a GPU, may launch; its pages do not matter."""
    _, state = draft_state(MetaSpec.of(dataclasses.replace(config, device="meta", num_pages=1)))
    for batch in sorted({*batch_sizes(config), *default_batches(config.max_running)}):
        layout = BatchLayout(batch, state.proposer.path_rows)
        memory = BatchMemory.of(layout, state.width, state.device)
        results = torch.empty(batch, state.result_words, dtype=torch.int32, device=state.device)
        BatchProgram(state, layout, memory, results).run()
