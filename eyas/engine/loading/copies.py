"""Whether packed matrices have a widened copy on a GPU, so that products of many rows need not widen them."""

from __future__ import annotations

import logging

from eyas.common.types import KvKind, Role
from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.checkpoint.sizes import ITEMSIZE, page_bytes, parameters, replica_share, weight_bytes
from eyas.engine.kernels.products import skinny
from eyas.engine.loading.memory import CopiesDemand, DeviceMemory
from eyas.engine.loading.spec import EngineSpec
from kv_transfer.layout import pages_for


def has_copies(loaded: EngineSpec, group: KvKind) -> bool:
    """Whether the target, or the draft head, will have copies in 16 bits, before it is loaded: where steps
    have many rows, of prompts or of rounds of many sequences, and a copy fits. It spares each step the time
    to widen.
    """
    config, model = loaded.config, loaded.decoder(group)
    many = Role.PREFILL in config.roles or config.max_running * loaded.width > skinny.MAX_ROWS
    if not many or not config.device.startswith("cuda") or not isinstance(model.quantized, PackedConfig):
        return False
    fits = _demand(loaded, group).fits(DeviceMemory.measure(config.device), config.mem_fraction_static)
    how = "copied" if fits else "widened in every step"
    whose = "the draft head's " if group is KvKind.DRAFT else ""
    logging.getLogger("eyas.engine").info("%spacked weights are %s for many rows", whose, how)
    return fits


def _demand(loaded: EngineSpec, group: KvKind) -> CopiesDemand:
    """The memory that copies demand. A head's files have other names, so its weights count as if none were
    packed.
    """
    config, model, one = loaded.config, loaded.decoder(group), ITEMSIZE[loaded.config.dtype]
    ranks, matrices = config.tensor_parallel_size, parameters(model)
    weights = matrices.rest * one // ranks
    if group is KvKind.TARGET:
        amount = weight_bytes(model, config.dtype, config.device, config.deterministic)
        weights = amount.of_rank(ranks, config.dp_attention, replica_share(model, config))
    page = page_bytes(loaded.target, config.page_size, config.dtype, ranks)
    copies = (matrices.rest - matrices.as_stored) * one // ranks
    return CopiesDemand(
        weights, copies, longest=pages_for(loaded.target.context_length, config.page_size) * page
    )
