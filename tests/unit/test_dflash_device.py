"""DFlash heads on a device, kernels interpreted: a draft worker proposes there what the plain one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas import cli
from eyas.engine.kernels.drafts import block
from eyas.engine.speculation.draft_worker.device_runner import BatchBuffer, BatchLayout
from tests.unit.dflash_proposals import proposals
from tests.unit.tiny_dflash import write_tiny_dflash

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = {"layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}


@pytest.mark.parametrize(
    ("steps", "keys"),
    [
        pytest.param(3, WINDOW, id="a window"),
        pytest.param(1, {}, id="one draft"),
        pytest.param(3, {}, id="full attention", marks=pytest.mark.slow),
        pytest.param(3, {"sample_from_anchor": True}, id="from the root's row", marks=pytest.mark.slow),
    ],
)
def test_blocks_are_the_plain_runners(tmp_path: Path, steps: int, keys: dict[str, Any]) -> None:
    """Windows, seeds, batches that are filled up; from the root's row on or behind it."""
    ours, theirs = proposals(tmp_path, steps=steps, **keys)
    assert theirs == ours
    assert all(len(tokens) == steps for tokens, _ in ours)
    assert len({tuple(tokens) for tokens, _ in ours}) > 1, "every proposal was the same: nothing was tried"


def test_all_pieces_of_a_run_tell_the_tables_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device writes them in any order."""
    told_of: list[list[tuple[int, int, int]]] = []
    send = BatchBuffer.send

    def seen(buffer: BatchBuffer, layout: BatchLayout, inputs: Any, slots: list[int], writes: Any) -> None:
        send(buffer, layout, inputs, slots, writes)
        part = buffer._parts(layout)
        told_of.append([(slot, int(part["ends"][i]), int(part["last"][i])) for i, slot in enumerate(slots)])

    monkeypatch.setattr(BatchBuffer, "send", seen)
    proposals(tmp_path, steps=1)
    several = [batch for batch in told_of if len(batch) > len({slot for slot, *_ in batch})]
    assert len(several) > 2 and all(len(set(batch)) == len({slot for slot, *_ in batch}) for batch in several)


@pytest.mark.slow
def test_the_comparison_notices_a_causal_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay = block.lay
    monkeypatch.setattr(block, "lay", lambda batch, of, *rest: lay(batch, replace(of, causal=True), *rest))
    ours, theirs = proposals(tmp_path)
    assert theirs != ours


@pytest.mark.slow
def test_a_head_in_four_bits_drafts_there_too(tmp_path: Path) -> None:
    def written(folder: Path, target: Path, **shape: Any) -> Path:
        plain = write_tiny_dflash(tmp_path / "plain", target, **shape)
        flags = ["--out", str(folder), "--format", "int4", "--group-size", "32"]
        assert cli.main(["quantize", str(plain), *flags]) == 0
        return folder

    ours, theirs = proposals(tmp_path, written)
    assert theirs == ours
