"""A decoder that transformers computes, as a `DecoderModel` over Eyas' pages.

Rows of all sequences of a step are one row of tokens to it. What a token attends to is Eyas' business; all
else in a model is a row's own, which `check` has seen before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from eyas.engine.checkpoint.config import AttentionSpec, ModelConfig
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.foreign.pages import Heads, PagesMachine, StepPages
from eyas.engine.models.foreign.products import row_by_row
from eyas.engine.models.foreign.seams import TwoParts


@dataclass
class _Current:
    """The forward that runs: its pages and its pool; between two there is none."""

    pages: StepPages | None = None
    pool: KvPool | None = None
    attended: int = 0


@dataclass
class PagedLayer:
    """The attention of one module. `number`: of its layer in the pool."""

    number: int
    spec: AttentionSpec
    current: _Current
    sinks: torch.Tensor | None = field(default=None)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **said: Any
    ) -> torch.Tensor:
        """Attention over pages, in the shapes of `seams`. `mask` is not read: `spec` says which are seen."""
        current = self.current
        if current.pages is None or current.pool is None or current.attended != self.number:
            raise RuntimeError(f"layer {self.number} attends in another order than when it was judged")
        current.attended += 1
        if self.spec.sinks and self.sinks is None:
            self.sinks = said["s_aux"].detach().float()
        heads = Heads.of(query, key, value, current.pool)
        mixed = current.pages.attend(self.number, self.spec, heads, self.sinks)
        return mixed[None, :, :, : value.shape[3]]


class ForeignDecoder:
    """A `DecoderModel`. `model`: of transformers, with its weights."""

    def __init__(self, config: ModelConfig, model: Any, machine: PagesMachine) -> None:
        assert config.foreign is not None
        self.config = config
        self.kv_format: KvFormat = config.kv_format
        self._parts, self._machine, self._current = TwoParts(model), machine, _Current()
        modules = dict(self._parts.layers.named_modules(prefix=model.base_model_prefix))
        for number, (name, layer) in enumerate(zip(config.foreign.modules, config.layers, strict=True)):
            modules[name].attend_by = PagedLayer(number, layer.attention, self._current)

    def brief(self) -> Self:
        """Itself: its layers are called by code that is not known here."""
        return self

    def may_drop(self, count: int, taps: tuple[int, ...]) -> bool:
        """False: all rows pass all layers."""
        return False

    @torch.inference_mode()
    def forward(
        self, rows: Any, pool: KvPool, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs R rows and writes their KV. Returns what has left the last norm, [R, hidden]; nothing is
        tapped.
        """
        if taps:
            raise ValueError("the layers of a foreign model give no features")
        current = self._current
        current.pages, current.pool, current.attended = self._machine.step(rows, pool), pool, 0
        # Drafts may stand beyond the context, where a table of positions has no row: none is accepted.
        positions = rows.positions.clamp(max=self.config.context_length - 1)
        with row_by_row(rows.tokens.device.type):
            x = self._parts.rows(rows.tokens, positions)
        current.pages = current.pool = None
        if current.attended != self.config.num_layers:
            raise RuntimeError(f"{current.attended} of {self.config.num_layers} layers have attended")
        return x, x.new_empty(x.shape[0], 0)

    @torch.inference_mode()
    def logits(
        self,
        residual: torch.Tensor,
        picked: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        adapters: None = None,
    ) -> torch.Tensor:
        """Rows as `forward` gave them, all or those `picked` (integers [r]) -> float32 [r, vocab].

        `out`: where that is put, if it is given.
        """
        if picked is not None:
            residual = residual.index_select(0, picked)
        with row_by_row(residual.device.type):
            made = self._parts.logits(residual)
        return made.float() if out is None else out.copy_(made)


class ForeignOutline:
    """The kernels of Eyas' that a `ForeignDecoder` launches, on the device "meta", without its model."""

    def __init__(self, config: ModelConfig, machine: PagesMachine, dtype: torch.dtype) -> None:
        self.config, self.kv_format = config, config.kv_format
        self._machine, self._dtype = machine, dtype

    def brief(self) -> Self:
        """Itself: its layers are called by code that is not known here."""
        return self

    def may_drop(self, count: int, taps: tuple[int, ...]) -> bool:
        """False, as of the model."""
        return False

    def forward(
        self, rows: Any, pool: KvPool, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer of each kind."""
        pages, count = self._machine.step(rows, pool), rows.tokens.shape[0]
        for spec in dict.fromkeys(layer.attention for layer in self.config.layers):
            q, k = (self._room(count, n, spec.head_dim) for n in (spec.num_heads, spec.num_kv_heads))
            sinks = torch.empty(spec.num_heads, device="meta") if spec.sinks else None
            pages.attend(0, spec, Heads(q, k, k), sinks)
        return self._room(count, self.config.hidden_size), self._room(count, 0)

    def logits(
        self,
        residual: torch.Tensor,
        picked: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        adapters: None = None,
    ) -> torch.Tensor:
        """No numbers, of the right shape."""
        count = residual.shape[0] if picked is None else picked.shape[0]
        return torch.empty(count, self.config.vocab_size, device="meta") if out is None else out

    def _room(self, *sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=self._dtype, device="meta")
