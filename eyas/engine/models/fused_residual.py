"""The residual rows of a forward on a GPU, and how what a layer's half makes is added to them.

It knows rows, their sums of squares and the sums over ranks; what the halves compute it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import Normed
from eyas.engine.models.fused_step import Forward
from eyas.engine.parallel.group import ProcessGroup


@dataclass(frozen=True)
class NarrowRows:
    """The residual rows [m, hidden], and parts of their squares' sums, float32 [parts, 128]."""

    x: torch.Tensor
    sums: torch.Tensor | None = None


@dataclass(frozen=True)
class WideRows:
    """The residual rows [m, hidden], and what is still to be added to them: `added`, [m, hidden], if there is
    anything, or, with `post` [hidden], its norm with that gain.
    """

    x: torch.Tensor
    added: torch.Tensor | None = None
    post: torch.Tensor | None = None

    def settle(self, how: row_kernels.Norm, pdl: bool) -> Normed:
        """The norm of the rows to which it has been added, in place."""
        if self.added is None:
            return row_kernels.normed(self.x, how, pdl)
        return row_kernels.add_norm(self.added, self.x, how, self.post, pdl)

    def settled(self, eps: float, pdl: bool) -> torch.Tensor:
        """The rows to which it has been added, in place."""
        if self.added is None:
            return self.x
        if self.post is None:
            return self.x.add_(self.added)
        self.settle(row_kernels.Norm(eps), pdl)
        return self.x


def normed_rows(x: torch.Tensor, how: row_kernels.Norm, step: Forward) -> Normed:
    """The norm of rows x [m, hidden], for products that read finished rows."""
    launch = step.context.launch
    return row_kernels.normed(x, how, launch.pdl, launch.exact)


def narrow_product(x: torch.Tensor, weight: Projection, launch: skinny.Launch) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> [m, n], m <= 128."""
    assert weight.matrix is not None
    out = skinny.empty_padded(x.shape[0], weight.shape[0], like=x)
    skinny.linear(skinny.Source(x), weight.matrix, out, launch)
    return out


def add_product(
    x: torch.Tensor,
    weight: Projection,
    residual: NarrowRows,
    post: torch.Tensor | None,
    eps: float,
    step: Forward,
) -> NarrowRows:
    """The residual plus x . weight^T over all ranks, or plus the norm of that with gain `post`.

    The residual is added by the product, by the sum over several ranks, or by the kernel that norms.
    """
    source, launch, rows = skinny.Source(x), step.context.launch, residual.x
    if post is not None or step.context.group.ranks > 1:
        return add_made(narrow_product(x, weight, launch), residual, post, eps, step)
    assert (matrix := weight.matrix) is not None
    out = skinny.empty_padded(*rows.shape, like=rows)
    parts = skinny.linear_parts(source, matrix, launch)
    sums = torch.empty(parts, skinny.MAX_ROWS, dtype=torch.float32, device=x.device)
    skinny.linear(source, matrix, out, launch, rows, sums)
    return NarrowRows(out, sums)


def add_made(
    added: torch.Tensor, residual: NarrowRows, post: torch.Tensor | None, eps: float, step: Forward
) -> NarrowRows:
    """The residual plus the sum over all ranks of `added`, or plus the norm of that with gain `post`."""
    if post is not None:
        return add_normed_over_ranks(added, residual, post, eps, step)
    return add_over_ranks(added, residual, step)


def add_over_ranks(added: torch.Tensor, residual: NarrowRows, step: Forward) -> NarrowRows:
    """The residual plus the sum over all ranks of `added` [m, hidden], which is changed in place."""
    if step.context.launch.exact:
        return _add_in_order(added, residual, step)
    parts = ProcessGroup.sum_parts(added.shape[1])
    sums = torch.empty(parts, skinny.MAX_ROWS, dtype=torch.float32, device=added.device)
    step.context.group.all_reduce_add(added, residual.x, sums)
    return NarrowRows(added, sums)


def add_normed_over_ranks(
    added: torch.Tensor, residual: NarrowRows, post: torch.Tensor, eps: float, step: Forward
) -> NarrowRows:
    """The residual, changed in place, plus the norm with gain `post` of the sum over all ranks of `added`."""
    launch, group = step.context.launch, step.context.group
    (group.sum_in_order if launch.exact else group.all_reduce)(added)
    sums = row_kernels.add_normed(added, residual.x, post, eps, launch.pdl, launch.exact)
    return NarrowRows(residual.x, sums)


def _add_in_order(added: torch.Tensor, residual: NarrowRows, step: Forward) -> NarrowRows:
    parts = added.shape[1] // skinny.sum_group(added.shape[1])
    sums = torch.empty(parts, skinny.MAX_ROWS, dtype=torch.float32, device=added.device)
    step.context.group.sum_in_order(added, residual.x, sums)
    return NarrowRows(added, sums)


@dataclass(frozen=True)
class ScaledRows:
    """The residual rows [m, hidden] of a wide step in exact arithmetic, and 1 / rms of each, float32 [m]."""

    x: torch.Tensor
    scales: torch.Tensor

    def plus(self, added: torch.Tensor, post: torch.Tensor | None, eps: float, step: Forward) -> ScaledRows:
        """With the sum over all ranks of `added`, or the norm of that with gain `post` [hidden]. `added`:
        [m, hidden], or what `exact_wide.shares` gave.

        Both are changed in place.
        """
        group, x, pdl = step.context.group, self.x, step.context.launch.pdl
        if group.ranks > 1:
            added = exact_wide.total(added, x.dtype)
            if post is None:
                group.sum_in_order(added, x)
                return ScaledRows(added, exact_wide.settle(added, eps, pdl=pdl))
            group.sum_in_order(added)
        return ScaledRows(x, exact_wide.settle(x, eps, added, post, pdl))
