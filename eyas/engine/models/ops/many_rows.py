"""Any number of rows: cuBLAS' products, or those of a weight's format, with row kernels between them.

What a product adds to the residual waits until the residual is read: one kernel adds, and norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import NormedRows, Rows
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.parts import GatedPart


@dataclass(frozen=True)
class WideRows:
    """The residual rows [m, hidden], and what is still to be added to them: `added`, [m, hidden], if there is
    anything, or, with `post` [hidden], its norm with that gain.
    """

    x: torch.Tensor
    added: torch.Tensor | None = None
    post: torch.Tensor | None = None


class ManyRows(DeviceOps[WideRows, NormedRows]):
    """The residual is changed in place."""

    def embed(self, table: torch.Tensor, scale: float) -> WideRows:
        x, _ = row_kernels.embed(self.step.rows.tokens, table, scale=scale)
        return WideRows(x, torch.zeros_like(x))

    def residual(self, x: torch.Tensor) -> WideRows:
        return WideRows(x.clone())

    def joined(self, x: torch.Tensor, matrix: torch.Tensor) -> WideRows:
        return WideRows(torch.mm(x, matrix.t()))

    def given(self, x: torch.Tensor) -> NormedRows:
        return NormedRows(x)

    def rms(self, residual: WideRows, norm: row_kernels.NormInput | None) -> tuple[NormedRows, WideRows]:
        x, pdl = residual.x, self.step.context.launch.pdl
        if norm is None:
            read = NormedRows(self.leave(residual))
        elif residual.added is None:
            read = row_kernels.normed(x, norm, pdl)
        else:
            read = row_kernels.add_norm(residual.added, x, norm, residual.post, pdl)
        return read, WideRows(x)

    def leave(self, residual: WideRows) -> torch.Tensor:
        if residual.post is not None:
            self.rms(residual, row_kernels.NormInput(self.eps))
        elif residual.added is not None:
            residual.x.add_(residual.added)
        return residual.x

    def normed(self, read: NormedRows) -> NormedRows:
        return read

    def plus(self, residual: WideRows, added: torch.Tensor, post: torch.Tensor | None) -> WideRows:
        self.step.context.group.all_reduce(added)
        return WideRows(self.leave(residual), added, post)

    def gated(self, read: NormedRows, part: GatedPart[Projection]) -> Rows:
        if part.gate is None or not part.fused:
            return super().gated(read, part)
        made = self.product(read, part.projection, part.bias)
        return row_kernels.act_mul(made, part.gate.gelu, self.step.context.launch.pdl)
