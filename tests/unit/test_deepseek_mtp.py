"""NextN layers of DeepSeek-V3 and GLM-4.5, against transformers' layers behind a written-out join."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback, split_configs
from loopback_runs import assert_idle, mixed_requests, run_all, undrafted

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.spans import QuerySpan
from tests.unit.families import write_family
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.mtp_engines import CHAIN, TREE, config_of
from tests.unit.tiny_deepseek import Tensors, add_nextn, write_tiny_nextn_deepseek

N, STEPS = 70, 4
TOKENS = torch.randint(256, (N + 1,), generator=torch.Generator().manual_seed(3)).tolist()


@dataclass(frozen=True)
class Case:
    folder: Path
    target: Any
    layer: Any
    join: Tensors

    def joined(self, features: torch.Tensor, tokens: list[int], feature_first: bool = False) -> torch.Tensor:
        """eh_proj [enorm(embedding of the token) ; hnorm(feature)] of each row."""
        halves = [
            _norm(self.target.model.embed_tokens.weight[tokens], self.join["enorm"]),
            _norm(features, self.join["hnorm"]),
        ]
        return torch.cat(halves[::-1] if feature_first else halves, -1) @ self.join["eh_proj"].T

    def rows(self, joined: torch.Tensor) -> torch.Tensor:
        """The layer and the norm behind it, over all rows from position 0 on."""
        found: torch.Tensor = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
        return found


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    return Case(folder, *write_tiny_nextn_deepseek(folder))


def test_certain_rows_then_a_recurrent_chain(case: Case) -> None:
    check_chain(case)


def test_a_glm_has_a_layer_of_its_own_kind(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "rms_norm_eps": 1e-6}
    target = write_family(tmp_path, "glm4_moe", **sizes)
    alone = sizes | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    layer = write_family(tmp_path / "layer", "glm4_moe", std=0.1, **alone)
    check_chain(Case(tmp_path, target, layer, add_nextn(tmp_path, target, layer)))


@torch.no_grad()
def check_chain(case: Case) -> None:
    rig = Rig(case.folder)
    draft = HeadRig(case.folder, rig)
    _, captured = rig.forward([QuerySpan(rig.table(N), 0, N)], TOKENS[:N], draft.capture.layers)
    features = draft.capture.features(captured, torch.tensor(TOKENS[:N]))
    stated = case.target.model(torch.tensor([TOKENS[:N]])).last_hidden_state[0]
    assert (features - stated).abs().max() < 1e-4
    table = rig.table(N + STEPS)
    found = [draft.forward(features, [QuerySpan(table, 0, N)], TOKENS[1:])]
    joined, drafted = case.joined(features, TOKENS[1:]), list[int]()
    for step in range(STEPS):
        below = case.rows(joined)[-1:]
        drafted.append(int(draft.head.logits(found[-1][-1:])[0].argmax()))
        found.append(draft.forward(found[-1][-1:], [QuerySpan(table, N + step, 1)], drafted[-1:]))
        joined = torch.cat((joined, case.joined(below, drafted[-1:])))
    rows = torch.cat(found)
    assert (rows - case.rows(joined)).abs().max() < 2e-4
    logits = draft.head.logits(rows)
    assert (logits - case.layer.lm_head(case.rows(joined))).abs().max() < 2e-4
    assert len(set(drafted)) > 1
    swapped = case.rows(case.joined(features, TOKENS[1:], feature_first=True))
    assert (rows[:N] - swapped).abs().max() > 0.1, "the other order of the join would have been noticed"


ASKED = mixed_requests(6)


@pytest.fixture(scope="module")
def expected(case: Case, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, list[int]]]:
    """What plain decoding says to `ASKED`."""
    return undrafted(config_of(case.folder, tmp_path_factory.mktemp("pools")), ASKED)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("spec", "split"),
    [
        pytest.param(CHAIN, True, id="chain, split", marks=pytest.mark.slow),
        pytest.param(TREE, False, id="tree, unified"),
        pytest.param(CHAIN, False, id="chain, unified", marks=pytest.mark.slow),
        pytest.param(TREE, True, id="tree, split", marks=pytest.mark.slow),
    ],
)
def test_a_nextn_head_changes_no_token(
    case: Case, tmp_path: Path, expected: list[dict[int, list[int]]], spec: SpeculationConfig, split: bool
) -> None:
    config = replace(config_of(case.folder, tmp_path), speculation=spec)
    cluster = Loopback(*(split_configs(config) if split else (config,)))
    assert run_all(cluster, ASKED, split=split) == expected
    entries = [entry for result in cluster.results.values() for entry in result.entries]
    assert any(entry.accepted for entry in entries), "nothing was ever accepted: drafting was not exercised"
    assert_idle(cluster)
    cluster.close()
