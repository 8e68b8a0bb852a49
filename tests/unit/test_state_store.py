"""Slots of states: views of one memory that do not overlap, copies of slots, and rows that move in rings."""

from __future__ import annotations

import torch

from eyas.engine.states.shape import SPAN, DeltaShape, ring_rows
from eyas.engine.states.store import StateFormat, StateStore

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_size=8, value_size=6, kernel=4)


def _store(slots: int = 3, dtype: torch.dtype = torch.bfloat16) -> StateStore:
    format = StateFormat((0, 2), SHAPE, ring_rows(5), dtype)
    return StateStore(format, torch.zeros(slots, format.slot_bytes + 64, dtype=torch.uint8))


def test_a_ring_has_room_for_a_span_and_two_rounds() -> None:
    assert ring_rows(1) == ring_rows(32) == 2 * SPAN
    assert ring_rows(33) == 3 * SPAN


def test_parts_of_a_slot_do_not_overlap() -> None:
    store = _store()
    parts = [
        getattr(layer, name)
        for layer in store.layers.values()
        for name in ("states", "tails", "inputs", "gates")
    ]
    for number, part in enumerate(parts):
        part[1] = number + 1
    for number, part in enumerate(parts):
        assert (part[1] == number + 1).all()
        assert not part[0].any() and not part[2].any()
    assert store.layers[0].states.shape == (3, 4, 8, 6)
    assert store.layers[0].tails.shape == (3, 3, SHAPE.inputs)


def test_a_slot_is_copied_whole() -> None:
    store = _store()
    store.layers[2].states[2] = 7.0
    store.layers[0].inputs[2, 9] = 3.0
    store.copy(2, 0)
    assert (store.layers[2].states[0] == 7.0).all() and (store.layers[0].inputs[0, 9] == 3.0).all()
    assert not store.layers[2].states[1].any()


def test_rows_move_in_the_ring_after_all_were_read() -> None:
    store = _store()
    layer, ring = store.layers[2], store.format.ring
    for row in range(ring - 1, ring + 3):
        layer.inputs[1, row % ring] = row
        layer.gates[1, row % ring] = -row
    sources, targets = torch.tensor([ring, ring + 2]), torch.tensor([ring - 1, ring])
    store.move(torch.tensor([1, 1]), sources, targets)
    assert (layer.inputs[1, ring - 1] == ring).all() and (layer.inputs[1, 0] == ring + 2).all()
    assert (layer.gates[1, ring - 1] == -ring).all() and (layer.gates[1, 0] == -ring - 2).all()
