"""DFlash heads against their equations: features, the context's keys, blocks, logits; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eyas.common.config import SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import DraftBlock
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from eyas.engine.speculation.draft_worker.draft_runner import (
    DraftExtension,
    DraftInput,
    DraftRequest,
    DraftRunner,
)
from tests.unit.dflash_equations import DFlash
from tests.unit.head_chain import NOTICED, SAME, stored_keys
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import edit, write_tiny_llama
from tests.unit.tiny_dflash import MASK, write_tiny_dflash

N, FIRST, DRAFTS, ROOT = 70, 41, 7, 17  # certain rows; those of the first piece; drafts of a block; its root
READS = (2, 4, 6)
GREEDY = SamplingParams(temperature=0.0)
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 33}
HEADS = {
    "z-lab": {},
    "speculators": {"speculators": True, "draft_vocab": 100},
    "a layer with a window": WINDOW,
    "one layer, from the root's row on": {"layers": 1, "sample_from_anchor": True},
}
WRONG = (
    *("a causal block", "a block too late", "a block too early", "another mask", "no norm of features"),
    *("no norm of keys", "features pass the layer's norm", "the layers before"),
    *("a wider window", "a window that sees ahead"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target")


def worst_difference(target: Path, folder: Path, wrong: str = "") -> float:
    """Between the engine's head and its equations: features, keys, rows of two blocks, logits."""
    rig = Rig(target)
    draft = HeadRig(folder, rig)
    block = draft.config.block
    assert block is not None
    reads = tuple(layer - (wrong == "the layers before") for layer in READS)
    tokens = torch.randint(256, (N + 1,), generator=torch.Generator().manual_seed(3)).tolist()
    spans = [QuerySpan(rig.table(N), 0, N)]
    captured = [rig.forward(spans, tokens[:N], layers)[1] for layers in (draft.capture.layers, reads)]
    paper = DFlash(folder, target, MASK, wrong)
    found, wanted = (
        [draft.capture.features(captured[0], torch.tensor(tokens[:N]))],
        [paper.feature(captured[1])],
    )
    table = rig.table(N + DRAFTS + 1)
    for begin, end in ((0, FIRST), (FIRST, N)):  # the second block stands where the first one stood, and on
        draft.forward(
            found[0][begin:end], [QuerySpan(table, begin, end - begin)], tokens[begin + 1 : end + 1]
        )
        paper.extend(wanted[0][begin:end])
        width = block.width(DRAFTS)
        block_span = [QuerySpan(table, end, width, together=True)]
        rows = draft.drafted(found[0][:1], block_span, block.tokens(ROOT, width), depth=1).rows
        found += [rows, draft.head.logits(rows[block.first :])]
        wanted += [paper.block(ROOT, width), paper.drafts(ROOT, DRAFTS, block.first)]
        for layer in range(paper.layers):
            found.append(stored_keys(draft, table, end, layer))
            wanted.append(paper.context_keys(layer))
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_its_equations(target: Path, tmp_path: Path, kind: str) -> None:
    assert worst_difference(target, write_tiny_dflash(tmp_path, target, **HEADS[kind])) < SAME


@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_notices(target: Path, tmp_path: Path, wrong: str) -> None:
    keys = WINDOW if "window" in wrong else {}
    assert worst_difference(target, write_tiny_dflash(tmp_path, target, **keys), wrong) > NOTICED


@pytest.mark.parametrize("drafts", [DRAFTS, 3])
def test_a_runner_drafts_a_block_for_each(target: Path, tmp_path: Path, drafts: int) -> None:
    """Of two sequences at once; a shorter chain has a shorter block."""
    folder = write_tiny_dflash(tmp_path, target, draft_vocab=100)
    rig = Rig(target)
    draft = HeadRig(folder, rig)
    runner, ids = DraftRunner(draft.head, draft.pool, draft.backend), draft.head.token_map
    features = torch.randn(30, 64, generator=torch.Generator().manual_seed(2))
    spec, inputs, wanted = SpeculationConfig(drafts, 1, drafts + 1), [], []
    for rows, root in ((30, 9), (12, 11)):
        pages = rig.table(rows + runner.draft_rows(spec))
        extension = DraftExtension(pages, 0, [*range(rows - 1), root], features[:rows])
        inputs.append(DraftInput(rows, extension, GREEDY, choice=0))
        paper = DFlash(folder, target, MASK)
        paper.extend(features[:rows])
        wanted.append(ids[paper.drafts(root, drafts).argmax(-1)].tolist())
    proposed = runner.draft(inputs, spec)
    assert [list(one.tree.tokens) for one in proposed] == wanted
    assert all(one.tree.is_chain for one in proposed)


def test_a_known_seed_is_in_every_draft(target: Path, tmp_path: Path) -> None:
    """The noise of draft j is that of its own position, whatever the batch."""
    draft = HeadRig(write_tiny_dflash(tmp_path, target), rig := Rig(target))
    runner, spec = (
        DraftRunner(draft.head, draft.pool, draft.backend),
        SpeculationConfig(DRAFTS, 1, DRAFTS + 1),
    )
    new = DraftExtension(rig.table(64), 0, list(range(20)), torch.randn(20, 64))
    [last] = runner.extend([new])
    chains = []
    for temperature, seed in ((0.0, 0), (0.9, 5), (0.9, 6)):
        params = SamplingParams(temperature=temperature, seed=seed)
        request = DraftRequest.below(new, last, params, 0)
        [one], [same] = (runner.propose([request], spec) for _ in range(2))
        assert one == same
        chains.append(list(one.tokens))
    assert chains[0] != chains[1] != chains[2]


def test_the_layers_are_counted_by_their_output_or_by_their_input(target: Path, tmp_path: Path) -> None:
    described = read_model(target)
    for i, speculators in enumerate((False, True)):
        head = write_tiny_dflash(tmp_path / str(i), target, speculators=speculators)
        assert read_head(head, described).capture_layers == READS
    head = write_tiny_dflash(tmp_path / "spread", target, block_size=8, dflash_config={"mask_token_id": MASK})
    found = read_head(edit(head, {"fc.weight": torch.randn(64, 128)}), described)
    assert found.capture_layers == (2, 6)  # of 8, for two layers
    assert found.block == DraftBlock(most=7, mask_token=MASK)


REFUSED = {
    "hidden_size": ({"hidden_size": 32}, "its hidden_size is not the target's"),
    "window": ({**WINDOW, "is_causal": False}, "its layers with a window see rows behind their own"),
    "windows": ({**WINDOW, "layer_types": ["sliding_attention"]}, "layer_types and sliding_window do not go"),
    "mask": ({"dflash_config": {"mask_token_id": 256}}, "mask_token_id 256"),
    "block": ({"dflash_config": {"block_size": 1}}, "block_size 1 must be 2 or more"),
    "scaled": ({"dflash_config": {"mask_token_id": 1, "output_multiplier": 0.5}}, "output_multiplier"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_name(target: Path, tmp_path: Path, kind: str) -> None:
    keys, match = REFUSED[kind]
    head = write_tiny_dflash(tmp_path, target)
    (head / "config.json").write_text(json.dumps(json.loads((head / "config.json").read_text()) | keys))
    with pytest.raises(ConfigError, match=match):
        read_head(head, read_model(target))


def test_tensors_of_other_equations_are_refused(target: Path, tmp_path: Path) -> None:
    head = edit(
        write_tiny_dflash(tmp_path, target), {"layers.1.attention_conv.base_kernel": torch.ones(2, 2, 64)}
    )
    with pytest.raises(
        ConfigError, match=r"layers\.1\.attention_conv\.base_kernel belongs to equations unknown"
    ):
        read_head(head, read_model(target))
