"""P-EAGLE heads against their equations: certain rows, a block's rows, logits; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import DraftBlock
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, DraftRunner
from tests.unit.device_engines import PROMPT, SIZES, answers, on_device, rounds, tokens
from tests.unit.head_chain import NOTICED, SAME, stored_keys
from tests.unit.head_equations import PEagle
from tests.unit.loopback import Loopback
from tests.unit.loopback_runs import assert_idle, mixed_requests, patient, run_all, undrafted
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import edit, write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_peagle import DEPTHS, MASK, write_tiny_peagle
from tests.unit.wandering import wander

pytestmark = pytest.mark.usefixtures("one_thread")

N, FIRST = 70, 41  # certain rows; those of the first piece
TAPS = (2, 4, 5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
WARM = SamplingParams(temperature=0.9, top_p=0.9, seed=8, max_tokens=6, ignore_eos=True)
WRONG = (
    *("no streams", "another mask", "a position too late", "a position too early", "one position"),
    *("rows that see no others", "what a row gave", "no norm before fc", "the target's embedding"),
)
SPECULATORS: dict[str, Any] = {
    "ptd_token_id": None,
    "mask_token_id": MASK,
    "num_depths": None,
    "norm_before_residual": True,
    "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEPTHS}]},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target")


KINDS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"layers": 3},
    "speculators": {"rank": 3, "layers": 2} | SPECULATORS,
}


def worst_difference(target: Path, folder: Path, variants: tuple[str, ...] = (), wrong: str = "") -> float:
    """Between the engine's head and its equations: certain rows, keys, two blocks, logits."""
    rig = Rig(target)
    draft, paper = HeadRig(folder, rig), PEagle(folder, target, variants, wrong)
    block = draft.config.block
    assert block == DraftBlock(DEPTHS, MASK, rooted=False, first=-1, causal=True)
    width, table = block.width(DEPTHS), rig.table(N + DEPTHS)
    tokens = torch.randint(256, (N + 1,), generator=torch.Generator().manual_seed(3)).tolist()
    spans = [QuerySpan(rig.table(N), 0, N)]
    _, captured = rig.forward(spans, tokens[:N], TAPS)
    features, same = draft.capture.features(captured, torch.tensor(tokens[:N])), paper.feature(captured)
    found, wanted = [features], [same]
    for begin, end in ((0, FIRST), (FIRST, N)):  # the second block stands where the first one stood, and on
        certain = [QuerySpan(table, begin, end - begin)]
        rows = draft.forward(features[begin:end], certain, tokens[begin + 1 : end + 1])
        given = zip(same[begin:end], tokens[begin + 1 : end + 1], strict=True)
        theirs = torch.stack([paper.row(feature, token) for feature, token in given])
        below = draft.drafted(
            features[:1], [QuerySpan(table, end, width)], block.tokens(7, width), depth=1
        ).rows
        made = paper.block(MASK, width)
        scored = torch.cat((theirs[-1:], made))
        found += [rows, below, draft.head.logits(torch.cat((rows[-1:], below)))]
        wanted += [theirs, made, torch.stack([paper.logits(row) for row in scored])]
        for layer in range(len(paper.layers)):
            found.append(stored_keys(draft, table, end, layer))
            wanted.append(paper.layers[layer].keys())
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_its_equations(target: Path, tmp_path: Path, kind: str) -> None:
    variants = ("norm_before_residual",) if kind == "speculators" else ()
    assert worst_difference(target, write_tiny_peagle(tmp_path, target, **KINDS[kind]), variants) < SAME


@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_notices(target: Path, tmp_path: Path, wrong: str) -> None:
    assert worst_difference(target, write_tiny_peagle(tmp_path, target, layers=2), wrong=wrong) > NOTICED


def test_a_runner_drafts_all_depths_of_each(target: Path, tmp_path: Path) -> None:
    """The first draft is the newest certain row's."""
    folder = write_tiny_peagle(tmp_path, target)
    draft = HeadRig(folder, rig := Rig(target))
    runner, ids = DraftRunner(draft.head, draft.pool, draft.backend), draft.head.token_map
    features = torch.randn(30, 64, generator=torch.Generator().manual_seed(2))
    spec, inputs, wanted = SpeculationConfig(DEPTHS, 1, DEPTHS + 1), [], []
    for rows, root in ((30, 9), (12, 11)):
        new = DraftExtension(rig.table(rows + DEPTHS), 0, [*range(rows - 1), root], features[:rows])
        inputs.append(DraftInput(rows, new, GREEDY, choice=0))
        paper = PEagle(folder, target)
        newest = [paper.row(f, t) for f, t in zip(features[:rows], new.tokens, strict=True)][-1]
        scored = torch.cat((newest[None], paper.block(MASK, DEPTHS - 1)))
        wanted.append([int(ids[paper.logits(row).argmax()]) for row in scored])
    assert [list(one.tree.tokens) for one in runner.draft(inputs, spec)] == wanted


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_head_changes_no_token(target: Path, tmp_path: Path, split: bool) -> None:
    config = EngineConfig(
        model=str(target),
        draft=str(write_tiny_peagle(tmp_path / "head", target, layers=2)),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(tmp_path),
        worker="unified",
        speculation=SpeculationConfig(4, draft_tokens=5),
    )
    asked = mixed_requests(3, seed=4)
    cluster = patient(config) if split else Loopback(config)
    assert run_all(cluster, asked, split=split) == undrafted(config, asked)
    assert any(entry.accepted for result in cluster.results.values() for entry in result.entries)
    assert_idle(cluster)
    cluster.close()


def test_what_does_not_fit_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    known = read_model(target)
    head = write_tiny_peagle(tmp_path / "head", target)
    assert read_head(head, known).algorithm == "peagle"
    assert read_head(edit(head, {"mask_hidden": None}), known).algorithm == "eagle3"
    with pytest.raises(ConfigError, match="its mask_hidden is not as wide as what it captures"):
        read_head(edit(head, {"mask_hidden": torch.zeros(1, 64)}), known)
    fitting = {"mask_hidden": torch.zeros(1, 192)}
    with pytest.raises(ConfigError, match="it names no mask token"):
        read_head(edit(head, dict(fitting), ptd_token_id=None), known)
    with pytest.raises(ConfigError, match="ptd_token_id 256 must be 255 or less"):
        read_head(edit(head, ptd_token_id=256), known)
    edit(head, ptd_token_id=3)
    for speculation, complaint in (
        (SpeculationConfig(DEPTHS + 1, draft_tokens=DEPTHS + 2), "drafts up to 6 tokens at once"),
        (SpeculationConfig(2, topk=2, draft_tokens=4), "drafts chains"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            EngineSpec.of(EngineConfig(model=str(target), draft=str(head), speculation=speculation))
    assert read_head(edit(head, parallel_drafting=True), known, "dummy").algorithm == "peagle"


def small_config(folder: Path) -> EngineConfig:
    """A target and a head of one layer that fit an interpreted device."""
    small = write_tiny_llama(folder / "target", tied=False, **SIZES)
    head = write_tiny_eagle3(folder / "head", small)
    own = {"mask_hidden": torch.randn(1, 192, generator=torch.Generator().manual_seed(1))}
    captured = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}
    edit(head, dict(own), ptd_token_id=3, num_depths=3, eagle_config=captured)
    return EngineConfig(
        model=str(small),
        draft=str(head),
        num_pages=32,
        chunk_tokens=16,
        max_running=4,
        context_length=128,
        pool_dir=str(folder),
        worker="unified",
        speculation=SpeculationConfig(3, draft_tokens=4),
    )


@pytest.mark.slow
def test_a_device_drafts_as_the_plain_engine_does(tmp_path: Path) -> None:
    """Tokens, and where the rounds end: by one pass beside rounds alone, by two beside prompts."""
    plain = small_config(tmp_path)
    asked = [
        GenerationRequest(str(i), PROMPT[: 20 - 9 * i], params) for i, params in enumerate((GREEDY, WARM))
    ]
    expected, found = (answers(config, asked)[0] for config in (plain, on_device(plain)))
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    assert any(entry.accepted for result in found for entry in result.entries)


@pytest.mark.slow
def test_a_device_changes_no_token_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of every depth follow each other, plain ones too, whose rows wait for the head."""
    plain = small_config(tmp_path)
    params = msgspec.structs.replace(WARM, max_tokens=14)
    asked = [GenerationRequest("two chunks", PROMPT[:20], params)]
    expected, _ = answers(plain, asked)
    wander(monkeypatch)
    spec = replace(plain.speculation, adaptive=True)
    found, _ = answers(on_device(replace(plain, speculation=spec)), asked)
    assert tokens(found) == tokens(expected)
