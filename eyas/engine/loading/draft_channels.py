"""The direct channels between a decode engine and its draft workers, as the configuration wants them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from eyas.common.machine.gpus import number_of
from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import LocalGpu
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.speculation.drafters.channels import DecodeChannels, mail_place, may_mail
from kv_transfer.backends.table import AUTO
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.host_files import new_path

BY_MEMORY = (AUTO, "shm", "cuda_ipc")
"""What `transfer` may be where drafts may go by memory that two processes share."""

BY_GPU = "cuda_ipc"
"""With this, drafts go past the host even between two engines on one GPU; `auto` needs two GPUs."""


def decode_channels(loaded: EngineSpec) -> DecodeChannels:
    """The channels to draft workers of this host, unless pages and drafts are to go another way, or each
    commit is to say how deep its drafts may be.
    """
    config, spec = loaded.config, loaded.config.speculation
    assert loaded.head is not None
    gpu, place = gpu_of(loaded), mail_place(spec)
    shape = DraftChannel(
        export={},
        width=loaded.head.feature_width,
        nodes=place.nodes,
        places=config.max_running,
        rows=place.rows,
        gpu=gpu.driver.uuid if gpu is not None and may_mail(spec) else b"",
        dtype=gpu.dtype if gpu is not None else "",
    )
    by_memory = config.transfer in BY_MEMORY and not spec.adaptive
    path = partial(new_path, "mail", Path(config.pool_dir))
    return DecodeChannels(shape if by_memory else None, path, gpu)


def from_gpu_to_gpu(loaded: EngineSpec) -> bool:
    """True if features may go past the host.

    Not with several ranks: who waits for one has to look after others.
    """
    config = loaded.config
    kernels = config.device != "cpu" and config.attention_backend != "torch"
    others = config.transfer == AUTO and torch.cuda.device_count() > 1
    return kernels and (others or config.transfer == BY_GPU) and config.tensor_parallel_size == 1


def gpu_of(loaded: EngineSpec) -> LocalGpu | None:
    """The engine's own, if features may go from it, or come to it, past the host."""
    if not from_gpu_to_gpu(loaded):
        return None
    config = loaded.config
    dtype = str(loaded.placement.dtype).removeprefix("torch.")
    wait = partial(torch.cuda.synchronize, config.device)
    return LocalGpu(CudaDriver(number_of(config.device)), dtype, wait, shared=config.transfer == BY_GPU)
