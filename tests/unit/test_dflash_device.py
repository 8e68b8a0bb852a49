"""DFlash heads on a device, kernels interpreted: a draft worker proposes there what the plain one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import cli
from eyas.engine.kernels.drafts import block
from eyas.engine.speculation.draft_worker.device_runner import BatchProgram
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


def test_only_the_last_piece_of_a_run_tells_the_tables_where_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device writes the rows of a batch in any order, so two pieces of a run must not differ in this."""
    drafted: list[list[int]] = []
    written: list[list[int]] = []
    run = BatchProgram.run

    def seen(program: BatchProgram) -> None:
        tables, slots = program._state.tables, program._part["slots"].tolist()
        before = tables.length.clone(), tables.root.clone()
        run(program)
        real = [slot for slot in slots if slot != tables.padding_slot]
        (drafted if program._results.shape[1] > 1 else written).append(real)
        if program._results.shape[1] == 1:
            assert torch.equal(before[0], tables.length) and torch.equal(before[1], tables.root)

    monkeypatch.setattr(BatchProgram, "run", seen)
    proposals(tmp_path, steps=1)
    assert drafted and all(len(batch) == len(set(batch)) for batch in drafted)
    assert any(len(batch) > len(set(batch)) for batch in written), "no run had several pieces"


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
