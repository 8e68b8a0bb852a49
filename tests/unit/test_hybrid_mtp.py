"""The MTP layers of hybrids against transformers' layers of the same weights: dense, unpaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eyas.common.config import SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.models.heads import read_head
from eyas.engine.models.mtp_names import expected_prefixes
from tests.unit.family_sample import VOCAB
from tests.unit.hybrid_engines import Served, config_of, prompts
from tests.unit.hybrid_rig import ATTENDS, HYBRIDS, HybridRig, described, write_with_mtp
from tests.unit.model_rig import HeadRig

N = 70
TOKENS = torch.randint(VOCAB, (N + 1,), generator=torch.Generator().manual_seed(3))


def _theirs(folder: Path, name: str, head: dict[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    """norm(layer(fc [norm(e) ; norm(f)])), the layer being one of a model that transformers loads."""
    stored, other = load_file(folder / "model.safetensors"), folder / "other"
    for key in [key for key in stored if ATTENDS in key and "visual" not in key]:
        stored[key] = head[f"mtp.layers.0.{key.partition(ATTENDS)[2]}"]
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {k: v for k, v in stored.items() if not k.startswith("mtp")},
        other / "model.safetensors",
        {"format": "pt"},
    )
    model = (
        getattr(transformers, HYBRIDS[name].model).from_pretrained(other, attn_implementation="eager").model
    )
    text: Any = getattr(model, "language_model", model)

    def norm(x: torch.Tensor, which: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1.0 + head[f"mtp.{which}.weight"])

    with torch.no_grad():
        embedded = norm(text.embed_tokens(TOKENS[1:]), "pre_fc_norm_embedding")
        joined = torch.cat((embedded, norm(features, "pre_fc_norm_hidden")), -1) @ head["mtp.fc.weight"].T
        mask = torch.full((N, N), float("-inf")).triu(1)[None, None]
        places = torch.arange(N).expand(*([3] if name.startswith("qwen3_5") else []), 1, N)
        turns = text.rotary_emb(joined[None], places)
        return norm(text.layers[2](joined[None], position_embeddings=turns, attention_mask=mask)[0], "norm")


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name.startswith("qwen")])
def test_rows_are_those_of_the_equations(name: str, tmp_path: Path) -> None:
    head = write_with_mtp(tmp_path, name)
    target = HybridRig(tmp_path, described(tmp_path, name))
    rig = HeadRig(tmp_path, target)
    features = torch.randn(N, 64, generator=torch.Generator().manual_seed(6))
    table = target.table(N)
    spans = [QuerySpan(table, 0, 50), QuerySpan(table, 50, N - 50)]
    cuts = [slice(0, 50), slice(50, N)]
    ours = [
        rig.forward(features[cut], [span], TOKENS[1:][cut].tolist())
        for span, cut in zip(spans, cuts, strict=True)
    ]
    theirs = _theirs(tmp_path, name, head, features)
    assert (torch.cat(ours) - theirs).abs().max() <= 5e-5 * theirs.abs().max()


def test_a_head_of_two_layers_is_refused(tmp_path: Path) -> None:
    write_with_mtp(tmp_path, "qwen3_5")
    target = described(tmp_path, "qwen3_5")
    raw = json.loads((tmp_path / "config.json").read_text()) | {"mtp_num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="is 2, and its tensors are of 1 MTP layers"):
        read_head(tmp_path, target)


def test_a_folder_without_tensors_yet_says_where_they_will_be() -> None:
    raw = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}}
    assert expected_prefixes(raw, 4) == ["mtp"]
    assert expected_prefixes({"model_type": "qwen3_next", "num_nextn_predict_layers": 1}, 4) == ["mtp"]


@pytest.mark.usefixtures("one_thread")
def test_an_engine_that_drafts_by_it_answers_the_same(tmp_path: Path) -> None:
    """Chains of three, in batches and after cached states; the pages of both pools are freed."""
    (tmp_path / "model").mkdir()
    write_with_mtp(tmp_path / "model", "qwen3_next")
    plain = Served(config_of(tmp_path))
    expected = plain.together(prompts()[:3])
    plain.close()
    own = config_of(tmp_path, draft=str(tmp_path / "model"), speculation=SpeculationConfig(steps=3))
    served = Served(own)
    assert served.together(prompts()[:3]) == expected
    assert [served.alone(prompt) for prompt in prompts()[1:3]] == expected[1:]
    served.close()
