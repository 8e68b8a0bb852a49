"""How experts are computed: a router's choice, grouped products, and their sum by weight.

Launches whose shapes follow from the number of rows alone. Ranks divide the width of every expert, or share
experts out, whole (`LayerContext.sharers`). Scores, activations and biases that no kernel knows are plain
torch beside the same products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts import one_row, route, route_rows, scored_rows
from eyas.engine.kernels.experts.one_row import JudgedRow
from eyas.engine.kernels.experts.route import ChosenExperts, ExpertCopies, LocalExperts, Router
from eyas.engine.kernels.experts.route_rows import RouterProduct
from eyas.engine.kernels.experts.row_choice import RowChoice
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import single, skinny
from eyas.engine.kernels.products.blocks import NormedRows, StoredWeight
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.kernels.products.skinny_tiles import Table
from eyas.engine.layers import routing
from eyas.engine.models.ops.device_step import Forward, product_float32
from eyas.engine.models.ops.parts import ExpertsPart, Routed, RouterPart

FEW_AHEAD = 2
"""Rows: of more, the experts that they choose take so long that one which is there already saves nothing."""

KNOWN_SCORES = ("sigmoid", "softmax")
"""Those of `eyas.engine.layers.routing` that the kernel has."""


def routed(
    rows: NormedRows,
    part: RouterPart,
    step: Forward,
    judged: NormedRows | None = None,
) -> Routed:
    """Which experts rows take; where ranks share experts out, what everyone's rows take of those here.
    `judged`: the rows that the router reads, if they are others.
    """
    local, everyones = None, step.everyones
    uniform, pdl = step.context.uniform_experts, step.context.launch.pdl
    if everyones is not None:
        sharers, m = step.context.sharers, rows.plain.shape[0]
        rows, judged = _gathered(rows, step), None if judged is None else _gathered(judged, step)
        local = _local(part, range(m * sharers.rank, m * (sharers.rank + 1)), everyones)
    scored = logits((judged or rows).plain, part.weight, part.tiles, step)
    if part.updated is not None:
        scored = step.updated_scores(scored, (judged or rows).plain, part.updated)
    if part.spec.scores not in KNOWN_SCORES:
        if part.bias is not None:
            scored.add_(part.bias)
        chosen = chosen_by_default(scored, part, local, uniform)
    else:
        router = Router(part.spec, part.correction, part.shared, part.bias)
        chosen = route.choose_local(scored, router, local, uniform=uniform, pdl=pdl)
    if part.factors is not None:
        each = part.factors[_named(chosen.experts, part, local).clamp(0, part.spec.experts - 1)]
        chosen = ChosenExperts(chosen.experts, chosen.weights * each)
    if part.spec.weighs_input:
        rows = NormedRows(rows.plain * chosen.weights.to(rows.plain.dtype))
        chosen = ChosenExperts(chosen.experts, torch.ones_like(chosen.weights))
    return Routed(rows, chosen)


def _local(part: RouterPart, rows: range, everyones: torch.Tensor) -> LocalExperts:
    """The part's experts on this rank, whose own rows are `rows` of all ranks'."""
    if part.places is None:
        return LocalExperts(part.own, rows, everyones)
    copies = ExpertCopies(part.places.table, part.places.loads)
    return LocalExperts(part.places.own, rows, everyones, copies)


def _named(numbers: torch.Tensor, part: RouterPart, local: LocalExperts | None) -> torch.Tensor:
    """The experts, by the model's numbers, that choices [m, n] are of; anything where one is of none here."""
    if local is None:
        return numbers
    slots = (numbers + local.experts.start).clamp(min=0)
    return slots if part.places is None else part.places.owners[slots.clamp(max=local.experts.stop - 1)]


def routed_at_once(
    source: skinny.SkinnyInput,
    norm: row_kernels.NormInput | None,
    part: RouterPart,
    experts: ExpertsPart[Projection],
    step: Forward,
) -> Routed | None:
    """The same of few rows that have not passed their norm, by one launch; None where there is none."""
    (m, hidden), context = source.x.shape, step.context
    product = _product_at_once(norm, part, step)
    if product is None or source.sums is None or (part.shared and part.spec.shared_share):
        return None
    if not route_rows.can_take(m, part.spec, part.shared, hidden):
        return None
    weights = experts.gated.projection.of_experts, experts.out.projection.of_experts
    order = context.products.order_sizes(m * experts.per_row, weights)
    normed, chosen = route_rows.take(source, product, order, context.launch)
    return Routed(NormedRows(normed), chosen)


@dataclass(frozen=True)
class ScoredRoute:
    """Which experts take the rows, as they read them; and the residual [m, hidden], which is whole."""

    routed: Routed
    residual: torch.Tensor


def routed_rounded(
    rows: tuple[torch.Tensor, torch.Tensor | None],
    norm: row_kernels.NormInput,
    part: RouterPart,
    experts: ExpertsPart[Projection],
    step: Forward,
) -> ScoredRoute | None:
    """The same of few rows that experts read in FP8, and what the residual [m, hidden] waits for; by
    two launches, which add, norm and round as well. None where they do not know all of it.
    """
    (m, hidden), context, rounding = rows[0].shape, step.context, norm.rounding
    router = Router(part.spec, part.correction, part.shared, part.bias)
    plain = part.factors is None and not part.spec.weighs_input and part.spec.scores in KNOWN_SCORES
    own = experts.beside is None and experts.latent is None and step.everyones is None
    gated = experts.gated
    whole = gated.gate is not None and not step.ends_apart(gated.projection)
    read = rounding is not None and gated.projection.rounding == rounding and whole
    if not (plain and own and read) or norm.gain is None:
        return None
    if not scored_rows.can_score(m, hidden, rounding, router):
        return None
    assert rounding is not None
    shared = _shared_weight(gated.projection, part) if m <= FEW_AHEAD else None
    scored = scored_rows.score(rows, norm, part.weight, router, shared, context.launch.pdl)
    chosen = scored_rows.choose(scored, router, norm.eps, context.uniform_experts)
    return ScoredRoute(Routed(NormedRows(None, scored.rounded, rounding), chosen), scored.residual)


def _shared_weight(gated: Projection, part: RouterPart) -> torch.Tensor | None:
    """The gate and up of the expert that all rows take, if there is one beside the router's."""
    weight = gated.of_experts
    return weight.stored[part.spec.experts] if part.shared and isinstance(weight, StoredWeight) else None


def routed_row(
    x: torch.Tensor, norm: row_kernels.NormInput | None, part: RouterPart, step: Forward
) -> Routed | None:
    """The same of one row x, by a launch that norms and multiplies it, and the choice; None where there is
    none.
    """
    product, pdl = _product_at_once(norm, part, step), step.context.launch.pdl
    if product is None or not one_row.can_score(*x.shape):
        return None
    wide = part.spec.experts + (part.shared and part.spec.shared_share)
    normed, logits = one_row.score(x, product, wide, pdl)
    router = replace(product.router, bias=None)  # the logits have it
    chosen = route.choose_local(logits[None], router, None, uniform=product.uniform, pdl=pdl)
    return Routed(NormedRows(normed), chosen)


def _product_at_once(
    norm: row_kernels.NormInput | None, part: RouterPart, step: Forward
) -> RouterProduct | None:
    """A router's product that norms what it reads, if a kernel knows all that goes with it."""
    if norm is None or norm.gain is None or norm.rounding is not None:
        return None
    plain = part.factors is None and not part.spec.weighs_input and part.spec.scores in KNOWN_SCORES
    if not plain or step.context.launch.exact or step.everyones is not None:
        return None
    router = Router(part.spec, part.correction, part.shared, part.bias)
    return RouterProduct(part.weight, norm.gain, norm.eps, router, step.context.uniform_experts)


def judged(
    x: torch.Tensor,
    norm: row_kernels.NormInput | None,
    part: RouterPart,
    experts: ExpertsPart[Projection],
    step: Forward,
) -> JudgedRow | None:
    """A row x and its logits, for `mixed_row`; None where that way is not for these rows or experts."""
    weights = experts.gated.projection.of_experts, experts.out.projection.of_experts
    bare = experts.out.post is None and experts.out.scale == 1.0 and experts.beside is None
    product = _product_at_once(norm, part, step)
    if product is None or not bare or part.shared or step.context.group.ranks > 1:
        return None
    if experts.gated.gate is None or not step.context.products.are_packed(weights):
        return None
    if step.ends_apart(experts.gated.projection):
        return None
    choice = RowChoice.of(part.spec, step.context.uniform_experts)
    rows, hidden = x.shape
    if choice is None or not one_row.can_judge(rows, hidden, part.spec):
        return None
    return one_row.judge(x, product, choice, step.context.launch.pdl)


def mixed_row(
    row: JudgedRow, residual: torch.Tensor, part: ExpertsPart[Projection], step: Forward
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual row plus what its experts make of it, by weight, and its sums of squares."""
    products, gated, out = step.context.products, part.gated, part.out
    gate_up, down = gated.projection.of_experts, out.projection.of_experts
    assert gated.gate is not None
    order = row.order(products.order_sizes(part.per_row, (gate_up, down)).rows)
    inner = products.gate_up(row.normed, gate_up, order, part.per_row, gated.gate, gated.bias)
    return one_row.back_add(products.down_task(inner, down, order, out.bias), row, residual, products.launch)


def _gathered(rows: NormedRows, step: Forward) -> NormedRows:
    """The rows of all sharers, one below the other."""
    sharers, (m, hidden) = step.context.sharers, rows.plain.shape
    everyone = empty_padded(m * sharers.ranks, hidden, like=rows.plain)
    sharers.gather(rows.plain, everyone)
    return NormedRows(everyone)


def logits(rows: torch.Tensor, weight: torch.Tensor, tiles: Table, step: Forward) -> torch.Tensor:
    """A router's product, float32 [m, at least experts]."""
    launch, router = step.context.launch, StoredWeight(weight)
    if single.can_take(rows, router) and not launch.exact:
        return single.dense(rows, router, launch.pdl, torch.float32)
    made = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
    product_float32(rows, weight, made, replace(launch, tiles=tiles))
    return made


def chosen_by_default(
    logits: torch.Tensor, part: RouterPart, local: LocalExperts | None, uniform: bool
) -> ChosenExperts:
    """Experts chosen by scores that no kernel has; see `route.choose_local`."""
    spec, m = part.spec, logits.shape[0]
    share, logits = logits[:, spec.experts : spec.experts + 1], logits[:, : spec.experts]
    scores = routing.SCORES[spec.scores](logits)
    experts, weights = routing.choose(scores, spec, part.correction)
    if uniform:
        first = logits[:, :1].contiguous().view(torch.int32).abs()
        apart = torch.arange(spec.per_row, device=logits.device) * spec.experts // spec.per_row
        experts = (first + apart) % spec.experts
        weights = routing.weights_of(scores, experts, spec)
    if part.shared:
        experts = torch.cat((experts, experts.new_full((m, 1), spec.experts)), 1)
        last = routing.sigmoid(share) if spec.shared_share else weights.new_ones(m, 1)
        weights = torch.cat((weights, last), 1)
    if local is not None:
        experts = _numbers_here(experts, spec.experts, local)
    return ChosenExperts(experts.int(), weights)


def _numbers_here(experts: torch.Tensor, shared: int, local: LocalExperts) -> torch.Tensor:
    """The numbers of chosen experts [m, n] among those that are `local`; `shared`: the number of the shared
    one."""
    row = torch.arange(experts.shape[0], device=experts.device)[:, None]
    there, whole = local.kv_rows[:, None] >= 0, experts == shared
    mine = there & (row >= local.rows.start) & (row < local.rows.stop)
    slots = experts if local.copies is None else _slots_of(experts, mine & ~whole, local.copies, local.rows)
    here = ~whole & (slots >= local.experts.start) & (slots < local.experts.stop)
    number = (slots - local.experts.start).masked_fill(whole & mine, len(local.experts))
    return number.masked_fill(~(here | (whole & mine)) | ~there, -1)


def _slots_of(
    experts: torch.Tensor, counted: torch.Tensor, copies: ExpertCopies, rows: range
) -> torch.Tensor:
    """The slots of chosen experts [m, n], and anything of the shared one. `counted` [m, n]: the choices that
    count as loads; `rows`: this rank's.
    """
    known = experts.clamp(max=copies.table.shape[0] - 1)
    row = torch.arange(experts.shape[0], device=experts.device)[:, None]
    turn = row // len(rows) + row % len(rows) + known
    copies.loads.index_add_(0, known.flatten(), counted.flatten().to(copies.loads.dtype))
    return copies.table[known, 1 + turn % copies.table[known, 0]].to(experts.dtype)


def is_single(routed: Routed, part: ExpertsPart[Projection], step: Forward) -> bool:
    """Whether there is one row, for which weights can wait; a shared expert must be one of the others."""
    forth, back = part.gated.projection, part.out.projection
    if step.everyones is not None or part.beside is not None or not part.known or step.ends_apart(forth):
        return False
    weights = forth.of_experts, back.of_experts
    if not all(isinstance(each, StoredWeight) for each in weights):
        return False
    products, read = step.context.products, routed.rows.read_by(forth.rounding)
    fits = products.is_single(read, forth.weight) and products.is_single(read, back.weight, part.per_row)
    return fits and single.can_round(back.weight)


def inner_of_one_row(routed: Routed, part: ExpertsPart[Projection], step: Forward) -> torch.Tensor:
    """The rows that the gates of its experts pass, [experts of a row, width]."""
    weight, gate, pdl = part.gated.projection.weight, part.gated.gate, step.context.launch.pdl
    assert gate is not None
    read = weight.read(routed.rows.read_by(weight.rounding), pdl)
    return single.gated(read, weight, routed.chosen.experts, gate.gelu, pdl)


def made(routed: Routed, part: ExpertsPart[Projection], step: Forward) -> torch.Tensor:
    """The row that each choice's expert makes, [choices, hidden]; anything where a choice is of none."""
    products, gated, out = step.context.products, part.gated, part.out
    gate_up, down, experts = gated.projection.of_experts, out.projection.of_experts, routed.chosen.experts
    order = routed.chosen.order or products.walked(experts, (gate_up, down))
    read = routed.rows.read_by(gated.projection.rounding)
    if gated.gate is not None and not step.ends_apart(gated.projection):
        inner = products.gate_up(read, gate_up, order, part.per_row, gated.gate, gated.bias)
        return products.down(inner, down, order, out.bias)
    both = products.each(read, gate_up, order, part.per_row)
    both = step.updated_choices(both, routed.rows.plain, gated.projection, experts)
    inner = gated.activation(_plus(both, gated.bias, experts))
    made = products.each(inner, down, order, 1)
    return _plus(step.updated_choices(made, inner, out.projection, experts), out.bias, experts)


def _plus(made: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
    """Rows of choices [choices, n], in place, with the bias [experts, n] of each one's expert."""
    return made if bias is None else made.add_(bias[experts.flatten().clamp(min=0)])
