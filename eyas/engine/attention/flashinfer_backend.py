"""Prompt attention by flashinfer's FA3 template: causal queries over the paged pool, on Hopper.

It takes no decode rows, trees or CUDA graphs: flashinfer's plan reads lengths on the host, and fixes them in
what it launches.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import flashinfer
import numpy as np
import torch

from eyas.common.errors import ConfigError
from eyas.engine.attention.page_lists import page_lists
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kv.pool import PoolShape

HEAD_DIMS = (64, 128, 256)
PLANS_IN_FLIGHT = 2  # the running step's and the next one's

_NICENESS = 19
_WORKSPACE_BYTES = 1 << 20  # flashinfer wants one; this template never splits keys, so nothing is put there


class Fa3Build:
    """Compiles and loads the kernels of one dtype and head size in the background.

    nvcc takes about a minute of CPU for each of ten files, all at once under ninja. The library stays in
    ~/.cache/flashinfer/<version>/<architecture>/cached_ops (FLASHINFER_WORKSPACE_BASE replaces ~), named by
    dtypes and head size; a later build finds it there. No CUDA call is made, so graphs may be captured
    meanwhile. Raises ConfigError for a device, dtype or head size that the template does not have.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, device: str) -> None:
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise _refusal("needs a GPU of compute capability 9")
        if dtype not in (torch.bfloat16, torch.float16) or head_dim not in HEAD_DIMS:
            raise _refusal(f"has no {dtype} heads of {head_dim}")
        self.dtype = dtype
        self.head_dim = head_dim
        self.seconds = 0.0
        self._error: Exception | None = None
        # The compilers are nice. The thread is not: the engine's loop would wait whenever it is put aside
        # while it holds the interpreter's lock.
        os.environ.setdefault("FLASHINFER_NVCC_LAUNCHER", f"nice -n {_NICENESS}")
        self._thread = threading.Thread(target=self._build, name="fa3-build", daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """True from the moment on when a plan compiles nothing. Raises ConfigError if the build failed."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise ConfigError(f"flashinfer's FA3 kernels could not be built: {self._error}") from self._error
        return True

    def wait(self) -> None:
        """Returns once `ready`."""
        self._thread.join()
        self.ready()

    def _build(self) -> None:
        """The very call that a wrapper's plan makes; flashinfer keeps its result for the process."""
        began = time.perf_counter()
        no_position, no_window, no_cap, half_scores = 0, False, False, False
        variant = (self.head_dim, self.head_dim, no_position, no_window, no_cap, half_scores)
        try:
            types = (self.dtype, self.dtype, self.dtype, torch.int32)
            flashinfer.prefill.get_batch_prefill_module("fa3", *types, *variant)
        except Exception as error:
            self._error = error
        self.seconds = time.perf_counter() - began


class PrefillAttention:
    """Causal attention of prompt chunks: `plan` once per step, then `run` for each layer of that scale."""

    def __init__(self, heads: int, shape: PoolShape, scale: float, build: Fa3Build) -> None:
        """`heads`: of the queries; `scale`: of the scores.

        16 MiB of memory, half of it on the device, for each plan in flight.
        """
        self._heads, self._shape, self._scale, self._build = heads, shape, scale, build
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._wrappers = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
            for _ in range(PLANS_IN_FLIGHT)
        ]
        self._sent = [torch.cuda.Event() for _ in range(PLANS_IN_FLIGHT)]
        self._turn = 0
        self._rows = 0

    def ready(self) -> bool:
        """True if `plan` may be called; see `Fa3Build.ready`."""
        return self._build.ready()

    def made_up(self, rows: int) -> list[QuerySpan]:
        """None: its build goes on behind a start."""
        return []

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out the work of a step's chunks on the current stream, without waiting for the device.

        The query rows follow each other in the order of `spans`, which are causal and not empty. A span's
        `pages` may be longer than its rows need.
        """
        self._turn = (self._turn + 1) % PLANS_IN_FLIGHT
        sent = self._sent[self._turn]
        sent.synchronize()  # passed long ago: a plan's pinned memory is not written while it is being copied
        lists = page_lists(spans, self._shape.page_size)
        self._rows = int(lists.queries[-1])
        self._wrappers[self._turn].plan(
            *(_pinned(part) for part in (lists.queries, lists.first_page, lists.pages, lists.last_rows)),
            self._heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            self._shape.page_size,
            causal=True,
            sm_scale=self._scale,
            q_data_type=self._shape.dtype,
        )
        sent.record()
        return True

    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor) -> None:
        """q [C, heads, dim] over layer_pool [pages, 2, page_size, kv_heads, dim] into out [C, heads, dim].

        Only the last dimensions must be contiguous. The rows' own keys and values are already in the pool.
        C may exceed the plan's rows: those of `out` are left as they were.
        """
        rows = self._rows
        self._wrappers[self._turn].run(q[:rows], layer_pool, out=out[:rows], enable_pdl=False)


def _refusal(why: str) -> ConfigError:
    flag = "prefill-attention-backend"
    return ConfigError(f"flashinfer's FA3 template {why}: take --{flag} triton", param=flag)


def _pinned(array: np.ndarray) -> torch.Tensor:
    """Copies from plain memory would wait for the stream."""
    return torch.from_numpy(array).pin_memory()
