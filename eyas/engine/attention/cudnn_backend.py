"""Prompt attention by cuDNN, through torch: causal queries over the paged pool, on Hopper.

Its kernels take rows side by side, and plans are made for each shape. So a sequence's pages are read into one
place first, and shapes are few: rows before the chunk that all of its queries see, in stretches of powers of
two, are attended without a mask; the rest, up to each query's own row, with one. The parts are joined by the
logarithms of their sums. Of heads of 256 that takes two thirds of the time of the triton kernel
(docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from eyas.common.errors import ConfigError
from eyas.engine.attention.prompts import PromptChunk, bytes_of, chunks_of, made_up_chunk
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kernels.attention.joined import join, rows_of_pages
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kv.pool import PoolShape

UNIT = 1024
"""Rows: shapes are multiples of it."""
FEWEST, LEAST = 4096, 1024
"""Rows of a step's longest chunk, and of each: fewer are left to the triton kernel. A new shape takes the
host 45 ms, once."""
MOST_BYTES = 1 << 30
"""Of a sequence's keys and values in one layer, which a step reads into one place: a quarter of what is left
free for steps.
"""

_HEAD_DIMS = (64, 128, 256)

Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""q [m, heads, dim], k and v [n, kv_heads, dim], whether query i sees keys up to i alone, and the scale of
scores -> rows like q, and the natural logarithms of sums of exponentials, float32 [heads, m]."""


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Dense`, by cuDNN."""
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    made, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return made[0].transpose(0, 1), sums[0, :, :, 0]


class CudnnAttention:
    """Causal attention of prompt chunks: `plan` once per step, then `run` for each layer of that scale."""

    def __init__(self, shape: PoolShape, scale: float, attend: Dense = dense) -> None:
        """`scale`: of the scores. Raises ConfigError for heads that it has no kernel for."""
        if shape.dtype not in (torch.bfloat16, torch.float16) and attend is dense:
            raise _refusal(f"has no heads of {shape.dtype}")
        if shape.head_dim not in _HEAD_DIMS:
            raise _refusal(f"has no heads of {shape.head_dim}")
        if attend is dense and shape.device != "meta" and not torch.backends.cudnn.is_available():
            raise _refusal("is not there")
        self._shape, self._scale, self._attend = shape, scale, attend
        self._chunks: list[PromptChunk] = []

    def ready(self) -> bool:
        """True: a kernel that is not there yet comes with its first call."""
        return True

    def made_up(self, rows: int) -> list[QuerySpan]:
        """The fourth chunk of a prompt, in the pool's first page alone; see `PromptPlan.made_up`. The
        stretches before it are all that come before the first four.
        """
        if rows < FEWEST:
            return []
        return [made_up_chunk(rows, self._shape, start=3 * _units(rows))]

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out a step's chunks, whose query rows follow each other in the order of `spans`, without
        waiting for the device. False if some have too few rows, or a sequence has too many.
        """
        counts = [span.count for span in spans]
        if max(counts) < FEWEST or min(counts) < LEAST:
            return False
        if any(bytes_of(span, self._shape) > MOST_BYTES for span in spans):
            return False
        self._chunks = chunks_of(spans, self._shape)
        return True

    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor) -> None:
        """q [C, heads, dim] over layer_pool [pages, 2, page_size, kv_heads, dim] into out [C, heads, dim].

        Only the last dimensions must be contiguous. The rows' own keys and values are already in the pool.
        C may exceed the plan's rows: those of `out` are left as they were.
        """
        for chunk in self._chunks:
            self._run(q[chunk.rows], layer_pool, chunk, out[chunk.rows])

    def _run(self, q: torch.Tensor, layer_pool: torch.Tensor, chunk: PromptChunk, out: torch.Tensor) -> None:
        """Queries of rows between two units stand behind rows of no meaning, so that these end at a unit."""
        seen = chunk.start // UNIT * UNIT  # rows that all queries see, apart from the rest
        ahead = chunk.start - seen
        rows = _units(ahead + chunk.count)
        keys, values = rows_of_pages(layer_pool, chunk.pages, chunk.end, seen + rows)
        padded = q.new_empty(ahead + max(_units(chunk.count), rows - ahead), *q.shape[1:])
        own = slice(ahead, ahead + chunk.count)
        padded[own] = q
        made, sums = self._attend(padded[:rows], keys[seen:], values[seen:], True, self._scale)
        made, sums = made[own], sums[:, own]
        if not seen:
            out.copy_(made)
        for part in _stretches(seen):
            queries = padded[ahead : ahead + _units(chunk.count)]
            more, more_sums = self._attend(queries, keys[part], values[part], False, self._scale)
            sums = join((made, sums), (more[: chunk.count], more_sums[:, : chunk.count]), out)
            made = out


def _units(rows: int) -> int:
    return cdiv(rows, UNIT) * UNIT


def _stretches(rows: int) -> Iterator[slice]:
    """Rows in stretches of powers of two, the longest first."""
    first = 0
    while first < rows:
        length = 1 << ((rows - first).bit_length() - 1)
        yield slice(first, first + length)
        first += length


def _refusal(why: str) -> ConfigError:
    flag = "prefill-attention-backend"
    return ConfigError(f"cuDNN {why} for prompts: take --{flag} triton", param=flag)
