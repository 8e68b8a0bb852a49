"""DSpark heads against their equations: each draft's scores behind the draft before it; and whole engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loopback import Loopback
from loopback_runs import assert_idle, patient, run_all, undrafted

from eyas.common.config import SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.engine.checkpoint.config import DraftBlock
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftRequest, DraftRunner
from tests.unit.dflash_engines import ASKED, config_of
from tests.unit.dflash_equations import DFlash
from tests.unit.dflash_proposals import proposals
from tests.unit.head_chain import NOTICED, SAME
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import edit, write_tiny_llama
from tests.unit.tiny_dflash import BLOCK, MASK, RANK, write_tiny_dspark

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("vanilla", "gated", "rnn")
N, DRAFTS, ROOT = 20, 6, 17
TOKENS = (ROOT, 3, 200, 41, 5, 77)  # before each draft: any
WRONG = ("no bias", "the token of two before", "the drafts' own token", "no memory", "the row alone")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target")


class DSpark(DFlash):
    """`scores` of draft j behind the token before it. e = W1[token]; see docs/draft-heads.md."""

    def scores(self, rows: torch.Tensor, tokens: tuple[int, ...], kind: str) -> torch.Tensor:
        """Of drafts behind these tokens, rows [drafts, hidden] as the last norm gave them."""
        w, state, found = self.w, torch.zeros(RANK), []
        for j, row in enumerate(rows):
            at = {"the token of two before": max(j - 1, 0), "the drafts' own token": (j + 1) % len(tokens)}
            e = w["markov_head.markov_w1.weight"][tokens[at.get(self.wrong, j)]]
            if kind == "gated":
                mixed = torch.cat((row, e)) if self.wrong != "the row alone" else torch.cat((row, 0 * e))
                gate = w["markov_head.gate_proj.weight"] @ mixed + w["markov_head.gate_proj.bias"]
                e = torch.sigmoid(gate) * e
            if kind == "rnn":
                before = torch.zeros(RANK) if self.wrong == "no memory" else state
                z = w["markov_head.joint_proj.weight"] @ torch.cat((before, e, row))
                g, c, o = (z + w["markov_head.joint_proj.bias"]).split(RANK)
                state, e = torch.sigmoid(g) * before + (1 - torch.sigmoid(g)) * torch.tanh(c), torch.tanh(o)
            bias = w["markov_head.markov_w2.weight"] @ e
            found.append(self.lm_head @ row + (0 if self.wrong == "no bias" else bias))
        return torch.stack(found)


def difference(target: Path, folder: Path, kind: str, wrong: str = "") -> float:
    """Between the engine's scores of a block's drafts and the equations', the tokens before them given."""
    draft = HeadRig(folder, rig := Rig(target))
    paper = DSpark(folder, target, MASK, wrong)
    paper.extend(features := torch.randn(N, 64, generator=torch.Generator().manual_seed(2)))
    pages, runner = rig.table(64), DraftRunner(draft.head, draft.pool, draft.backend)
    runner.extend([DraftExtension(pages, 0, list(range(N)), features)])
    rows = paper.block(ROOT, DRAFTS)
    couple, logits = draft.head.coupling(rows[None]), draft.head.logits(rows)
    found = [couple(logits[j : j + 1], j, torch.tensor([t]))[0] for j, t in enumerate(TOKENS)]
    return float((torch.stack(found) - paper.scores(rows, TOKENS, kind)).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_know_the_one_before(target: Path, tmp_path: Path, kind: str) -> None:
    """Scores, and a runner's chain: it has what it chose before in them."""
    folder = write_tiny_dspark(tmp_path, target, kind, draft_vocab=100)
    assert difference(target, folder, kind) < SAME
    draft = HeadRig(folder, rig := Rig(target))
    runner, ids = DraftRunner(draft.head, draft.pool, draft.backend), draft.head.token_map
    paper = DSpark(folder, target, MASK)
    paper.extend(features := torch.randn(N, 64, generator=torch.Generator().manual_seed(2)))
    new = DraftExtension(rig.table(64), 0, [*range(N - 1), ROOT], features)
    [last] = runner.extend([new])
    request = DraftRequest.below(new, last, SamplingParams(temperature=0.0), 0)
    [tree] = runner.propose([request], SpeculationConfig(DRAFTS, 1, DRAFTS + 1))
    rows, chain = paper.block(ROOT, DRAFTS), [ROOT]
    for j in range(DRAFTS):
        chain.append(int(ids[paper.scores(rows[: j + 1], tuple(chain), kind)[-1].argmax()]))
    assert list(tree.tokens) == chain[1:]
    alone = ids[(rows @ paper.lm_head.T).argmax(-1)].tolist()
    assert alone != chain[1:]  # without the Markov head these would be other drafts


@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_notices(target: Path, tmp_path: Path, wrong: str) -> None:
    kind = {"no memory": "rnn", "the row alone": "gated"}.get(wrong, "vanilla")
    assert difference(target, write_tiny_dspark(tmp_path, target, kind), kind, wrong) > NOTICED


def test_it_is_told_by_its_tensors(target: Path, tmp_path: Path) -> None:
    described = read_model(target)
    head = write_tiny_dspark(tmp_path, target, "rnn")
    found = read_head(head, described)
    assert (found.algorithm, found.variants, found.own_outputs) == ("dspark", {"rnn"}, True)
    assert found.block == DraftBlock(most=BLOCK, mask_token=MASK, first=0, coupling=RANK)
    with pytest.raises(ConfigError, match="its markov_head_type 'lstm' is not supported"):
        read_head(edit(head, markov_head_type="lstm"), described)
    names = [f"markov_head.{name}.weight" for name in ("markov_w1", "markov_w2", "joint_proj")]
    bare = edit(head, dict.fromkeys(names), markov_rank=0)
    found = read_head(bare, described)
    assert (found.algorithm, found.block) == ("dflash", DraftBlock(most=BLOCK, mask_token=MASK, first=0))


def test_a_coupled_block_changes_no_token(tmp_path: Path) -> None:
    """In one engine, and by the draft service."""
    config = config_of(tmp_path, (1, 2, 4), layers=4)
    head = write_tiny_dspark(tmp_path / "coupled", Path(config.model), reads=(1, 2, 4))
    config, asked = replace(config, draft=str(head)), ASKED[:3]
    expected = undrafted(config, asked)
    for split, cluster in ((False, Loopback(config)), (True, patient(config))):
        assert run_all(cluster, asked, split=split) == expected
        assert any(entry.accepted for result in cluster.results.values() for entry in result.entries)
        assert_idle(cluster)
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_drafts_what_the_plain_runner_does(tmp_path: Path, kind: str) -> None:
    ours, theirs = proposals(tmp_path, write_tiny_dspark, kind=kind)
    assert theirs == ours and len({tuple(tokens) for tokens, _ in ours}) > 2
