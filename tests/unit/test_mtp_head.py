"""MTP heads against their equations, written out here in plain PyTorch: dense, unpaged, row by row.

Every published form: MiMo's and NextN beside the target's layers, and NextN in a folder of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.mtp_equations import Equations, Form, N, close
from tests.unit.tiny import write_tiny_eagle3
from tests.unit.tiny_mtp import MIMO, THETA, export_nextn, nextn_prefix, write_tiny_mimo, write_tiny_nextn

STEPS = 5
FORMS = ("mimo", "nextn", "export")
TOKENS = torch.randint(256, (N + 1,), generator=torch.Generator().manual_seed(3)).tolist()


@dataclass(frozen=True)
class Case:
    target: Path
    head: Path
    form: Form

    def paper(self, **trap: Any) -> Equations:
        return Equations(self.head, self.target, dataclasses.replace(self.form, **trap))


@pytest.fixture(scope="module", params=FORMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "mimo":
        target = write_tiny_mimo(folder / "target", layers=4)
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        return Case(target, target, Form(MIMO, names, True, True, THETA))
    target = write_tiny_nextn(folder / "target", layers=4)
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    head, prefix = target, nextn_prefix(target)
    if request.param == "export":
        head, prefix = export_nextn(folder / "head", target), "model.layers.0"
    return Case(target, head, Form(prefix, names, False, False, 10000.0))


@dataclass(frozen=True)
class Run:
    """What the head makes of the target's features: certain rows in two pieces, then a chain of its own."""

    features: torch.Tensor
    captured: torch.Tensor
    certain: torch.Tensor
    chain: torch.Tensor
    drafted: list[int]
    keys: torch.Tensor
    logits: torch.Tensor


@pytest.fixture(scope="module")
def run(case: Case) -> Run:
    rig = Rig(case.target)
    draft = HeadRig(case.head, rig)
    _, captured = rig.forward([QuerySpan(rig.table(N), 0, N)], TOKENS[:N], draft.capture.layers)
    features = draft.capture.features(captured, torch.tensor(TOKENS[:N]))
    table = rig.table(N + STEPS)
    certain = torch.cat(
        [
            draft.forward(features[:41], [QuerySpan(table, 0, 41)], TOKENS[1:42]),
            draft.forward(features[41:], [QuerySpan(table, 41, N - 41)], TOKENS[42:]),
        ]
    )
    chain, drafted = [certain[-1:]], []
    for step in range(STEPS):
        drafted.append(int(draft.head.logits(chain[-1])[0].argmax()))
        chain.append(draft.forward(chain[-1], [QuerySpan(table, N + step, 1)], drafted[-1:]))
    keys = draft.pool.layer(0)[table, 0].flatten(0, 1)[: N + STEPS]
    rows = torch.cat(chain[1:])
    return Run(
        features, captured, certain, rows, drafted, keys, draft.head.logits(torch.cat((certain, rows)))
    )


def equations(paper: Equations, run: Run) -> torch.Tensor:
    """g of the rows of `run`, made of the same features and tokens."""
    rows, below = [], torch.empty(0)
    for feature, token in zip(run.features, TOKENS[1:], strict=True):
        g, below = paper.row(feature, token)
        rows.append(g)
    for token in run.drafted:
        g, below = paper.row(below, token)
        rows.append(g)
    return torch.stack(rows)


def test_certain_rows_then_a_recurrent_chain(case: Case, run: Run) -> None:
    paper = case.paper()
    wanted = equations(paper, run)
    assert close(run.certain, wanted[:N])
    assert close(run.chain, wanted[N:])
    assert close(run.logits, torch.stack([paper.logits(g) for g in wanted]))
    assert close(run.keys, paper.keys())
    assert len(set(run.drafted)) > 1


def test_the_feature_has_passed_the_targets_last_norm(case: Case, run: Run) -> None:
    gain = load_file(case.target / "model.safetensors")["model.norm.weight"]
    x = run.captured
    assert close(run.features, x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain)
    assert not close(run.features, x)  # power check


@pytest.mark.parametrize("trap", ["order", "blank", "recurrence", "shift", "gap"])
def test_the_comparison_notices_every_trap(case: Case, run: Run, trap: str) -> None:
    """Power check: the equations of another head are seen, from the row on that they are about.

    Where all positions are shifted, queries meet keys as before, but the keys are others.
    """
    form = case.form
    changes: dict[str, dict[str, Any]] = {
        "order": {"hidden_first": not form.hidden_first},
        "blank": {"first_is_blank": not form.first_is_blank},
        "recurrence": {"raw_recurrence": True},
        "shift": {"shift": 1},
        "gap": {"gap": 1},
    }
    paper = case.paper(**changes[trap])
    wrong, found = equations(paper, run), torch.cat((run.certain, run.chain))
    assert close(run.keys, paper.keys()) is False
    first = {"order": 0, "blank": 0, "recurrence": N, "shift": 0, "gap": N}[trap]
    assert first == 0 or close(found[:first], wrong[:first])
    if trap != "shift":
        assert not close(found[first], wrong[first])


def test_a_row_of_another_position_is_not_blank(case: Case) -> None:
    """A sequence that is opened from a window has its first row elsewhere."""
    rig = Rig(case.target)
    draft = HeadRig(case.head, rig)
    features, table = torch.randn(1, 64), rig.table(1)
    first, later = (
        [draft.forward(features, [QuerySpan(table, 0, 1, offset=offset)], [token])[0] for token in (5, 6)]
        for offset in (0, 3)
    )
    assert torch.equal(*first) == case.form.first_is_blank
    assert not torch.equal(*later)


def test_drafts_of_many_sequences_equal_drafts_alone(case: Case, run: Run) -> None:
    rig = Rig(case.target)
    draft = HeadRig(case.head, rig)
    tables = [rig.table(N) for _ in range(3)]
    alone = draft.forward(run.features, [QuerySpan(tables[0], 0, N)], TOKENS[1:])
    spans = [QuerySpan(tables[1], 0, 33), QuerySpan(tables[2], 0, N)]
    together = draft.forward(torch.cat((run.features[:33], run.features)), spans, TOKENS[1:34] + TOKENS[1:])
    assert torch.equal(together, torch.cat((alone[:33], alone)))


def test_only_the_heads_tensors_are_there(case: Case) -> None:
    config = read_head(case.head, read_model(case.target))
    with FolderWeights(case.head, prefixes=config.prefixes) as weights:
        assert f"{case.form.prefix}.self_attn.q_proj.weight" in weights
        assert "model.layers.1.mlp.up_proj.weight" not in weights and "lm_head.weight" not in weights


def test_a_dummy_head_is_the_stored_one(case: Case) -> None:
    target = read_model(case.target)
    stored, dummy = read_head(case.head, target), read_head(case.head, target, "dummy")
    assert dummy.decoder == dataclasses.replace(stored.decoder, load_format="dummy")
    if case.head == case.target:
        assert dummy.prefixes == stored.prefixes
    assert dummy.fingerprint != stored.fingerprint


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"eh_proj.weight": None}, "it is the model's own folder, and has no MTP layer"),
        ({"hnorm.weight": None}, r"no tensor model.layers.8.hnorm.weight"),
        ({"eh_proj.weight": torch.zeros(64, 64)}, r"eh_proj.weight of .* is \(64, 64\)"),
        (
            {"self_attn.kv_a_proj_with_mqa.weight": torch.zeros(8, 64)},
            "latent attention .*, its target's last has not",
        ),
        ({"mlp.gate.weight": torch.zeros(8, 64)}, "experts .*, its target's last has not"),
    ],
)
def test_a_head_that_cannot_work_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    folder = write_tiny_nextn(tmp_path / "target")
    prefix, stored = nextn_prefix(folder), load_file(folder / "model.safetensors")
    stored |= {f"{prefix}.{name}": tensor for name, tensor in change.items()}
    save_file({k: v for k, v in stored.items() if v is not None}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=complaint):
        HeadRig(folder, Rig(folder))


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    target, other = write_tiny_nextn(tmp_path / "target"), write_tiny_nextn(tmp_path / "other", vocab=300)
    with pytest.raises(ConfigError, match="vocab_size is not the target's"):
        read_head(export_nextn(tmp_path / "head", other), read_model(target))


def test_another_kind_of_head_is_still_seen(tmp_path: Path) -> None:
    target = write_tiny_mimo(tmp_path / "target")
    head = write_tiny_eagle3(tmp_path / "head", target)
    assert read_head(head, read_model(target)).algorithm == "eagle3"
    assert read_head(target, read_model(target)).algorithm == "mtp"
