"""The gated delta rule in plain torch: as in transformers, and bits that follow from a path alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from eyas.engine.states.delta import DeltaRows, DeltaRule, DeltaState
from eyas.engine.states.shape import SPAN, DeltaShape

SHAPE = DeltaShape(key_heads=2, value_heads=6, key_size=16, value_size=24, kernel=4)


@pytest.fixture
def rule() -> DeltaRule:
    torch.manual_seed(1)
    return DeltaRule(SHAPE, torch.randn(SHAPE.kernel, SHAPE.inputs))


def _rows(count: int, seed: int = 2) -> DeltaRows:
    made = torch.Generator().manual_seed(seed)
    gates = (count, SHAPE.value_heads)
    return DeltaRows(
        torch.randn(count, SHAPE.inputs, generator=made),
        -torch.rand(gates, generator=made),
        torch.rand(gates, generator=made),
    )


def _chain(count: int, state: int = 0, first: int = 0) -> list[int]:
    return [-1 - state, *range(first, first + count - 1)][:count]


def _start(count: int = 1) -> DeltaState:
    return DeltaState.empty(SHAPE, count, torch.float32)


def _theirs(rule: DeltaRule, rows: DeltaRows, *, chunked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers reads of a sequence's first rows, and its state behind them."""
    mixed = F.conv1d(F.pad(rows.inputs.t(), (3, 0))[None], rule.filters.t()[:, None], groups=SHAPE.inputs)
    mixed = F.silu(mixed).transpose(1, 2)
    q, k, v = mixed.split((32, 32, SHAPE.value_heads * SHAPE.value_size), 2)
    q, k = (each.unflatten(2, (2, 16)).repeat_interleave(3, 2) for each in (q, k))
    kind = "chunk" if chunked else "recurrent"
    read, state = getattr(theirs, f"torch_{kind}_gated_delta_rule")(
        q,
        k,
        v.unflatten(2, (6, 24)),
        g=rows.decay[None],
        beta=rows.beta[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return read[0], state


@pytest.mark.parametrize("chunked", [False, True])
def test_rows_and_states_are_those_of_transformers(rule: DeltaRule, chunked: bool) -> None:
    rows = _rows(150)
    read, state = _theirs(rule, rows, chunked=chunked)
    torch.testing.assert_close(rule.run(_start(), rows, _chain(150)), read, rtol=1e-4, atol=2e-5)
    folded = rule.folded(_start(), rows)
    torch.testing.assert_close(folded.state, state, rtol=1e-4, atol=2e-5)
    assert torch.equal(folded.tail[0], rows.inputs[-3:])


def test_a_state_stands_for_the_rows_before_it_to_the_bit(rule: DeltaRule) -> None:
    rows, start = _rows(2 * SPAN + 20), _start()
    whole = rule.run(start, rows, _chain(2 * SPAN + 20))
    for first in range(0, 2 * SPAN + 1, SPAN):
        rest = rows.some(slice(first, None))
        assert torch.equal(rule.run(start, rest, _chain(len(rest.decay))), whole[first:])
        start = rule.folded(start, rest.some(slice(SPAN)))


def test_a_row_does_not_depend_on_the_rows_behind_it_or_beside_it(rule: DeltaRule) -> None:
    rows = _rows(70)
    whole = rule.run(_start(), rows, _chain(70))
    for cut in (1, 2, 5, 33, 64):
        assert torch.equal(rule.run(_start(), rows.some(slice(cut)), _chain(cut)), whole[:cut])
        assert torch.equal(rule.run(_start(), rows, _chain(70), [cut]), whole[[cut]])
    start = rule.folded(_start(2), _rows(2 * SPAN, 3))
    both = rule.run(start, rows, [*_chain(30), *_chain(40, 1, 30)])
    for i, part in enumerate((slice(30), slice(30, 70))):
        alone = DeltaState(*(each[i : i + 1] for each in start))
        some = rows.some(part)
        assert torch.equal(rule.run(alone, some, _chain(len(some.decay))), both[part])


def test_a_node_of_a_tree_is_the_row_of_its_path(rule: DeltaRule) -> None:
    rows = _rows(12)
    parents = [-1, 0, 1, 2, 2, 3, 4, 4, 0, 8, 9, 6]  # rows 0 and 1 are certain
    tree = rule.run(_start(), rows, parents)
    for node in range(12):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = rule.run(_start(), rows.some(torch.tensor(path)), _chain(len(path)))
        assert torch.equal(alone[-1], tree[node])


def test_shorter_rows_are_computed_in_float32(rule: DeltaRule) -> None:
    rows = _rows(9)
    short = rows._replace(inputs=rows.inputs.bfloat16())
    start = DeltaState.empty(SHAPE, 1, torch.bfloat16)
    wide = rule.run(_start(), short._replace(inputs=short.inputs.float()), _chain(9))
    assert torch.equal(rule.run(start, short, _chain(9)), wide)
    assert rule.folded(start, short).tail.dtype == torch.bfloat16
