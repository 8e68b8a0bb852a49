"""The EAGLE-3 head against its equations, as the official code has them. Variants: `test_eagle3_variants`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.models.heads import read_head
from tests.unit.head_equations import Eagle3
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama

N = 70  # certain rows: more than one block of keys
STEPS = 5


@pytest.fixture(params=[None, 100], ids=["shared_head", "own_head_d2t"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    target = write_tiny_llama(tmp_path / "target", rope={"rope_type": "default", "rope_theta": 500000.0})
    return target, write_tiny_eagle3(tmp_path / "head", target, draft_vocab=request.param)


@pytest.fixture
def tokens() -> list[int]:
    return torch.randint(256, (N + 1,), generator=torch.Generator().manual_seed(3)).tolist()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-5)


def test_extend_rows_then_a_recurrent_chain(folders: tuple[Path, Path], tokens: list[int]) -> None:
    target, folder = folders
    rig = Rig(target)
    draft = HeadRig(folder, rig)
    _, captured = rig.forward([QuerySpan(rig.table(N), 0, N)], tokens[:N], draft.capture.layers)
    features = draft.capture.features(captured, torch.tensor(tokens[:N]))
    paper = Eagle3(folder, target)
    assert close(features, captured @ paper.w["fc.weight"].T)

    table = rig.table(N + STEPS)
    hidden = torch.cat(
        [
            draft.forward(features[:41], [QuerySpan(table, 0, 41)], tokens[1:42]),
            draft.forward(features[41:], [QuerySpan(table, 41, N - 41)], tokens[42:]),
        ]
    )
    wanted = torch.stack([paper.row(f, t) for f, t in zip(features, tokens[1:], strict=True)])
    assert close(hidden, wanted)
    assert close(draft.head.logits(hidden), torch.stack([paper.logits(g) for g in wanted]))

    ours, theirs = hidden[-1:], wanted[-1]
    kept = load_file(folder / "model.safetensors").get("t2d", torch.ones(256)).nonzero().flatten()
    for step in range(STEPS):
        logits = draft.head.logits(ours)
        assert close(logits[0], paper.logits(theirs))
        best = int(logits[0].argmax())
        token = best if draft.head.token_map is None else int(draft.head.token_map[best])
        assert token == kept[best]  # the d2t offsets and the t2d mask agree on the id
        ours = draft.forward(ours, [QuerySpan(table, N + step, 1)], [token])
        theirs = paper.row(theirs, token)
        assert close(ours[0], theirs)


def test_the_comparison_notices_the_targets_theta(folders: tuple[Path, Path], tokens: list[int]) -> None:
    """Power check: a head that took the target's rope_theta would be seen."""
    target, folder = folders
    features = torch.randn(N, 64, generator=torch.Generator().manual_seed(4))
    rig = Rig(target)
    draft = HeadRig(folder, rig)
    hidden = draft.forward(features, [QuerySpan(rig.table(N), 0, N)], tokens[1:])
    wrong = Eagle3(folder, target, wrong="the target's rope_theta")
    assert not close(hidden[-1], [wrong.row(f, t) for f, t in zip(features, tokens[1:], strict=True)][-1])


def test_drafts_of_many_sequences_equal_drafts_alone(folders: tuple[Path, Path], tokens: list[int]) -> None:
    target, folder = folders
    rig = Rig(target)
    draft = HeadRig(folder, rig)
    features = torch.randn(N, 64, generator=torch.Generator().manual_seed(4))
    tables = [rig.table(N) for _ in range(3)]
    alone = draft.forward(features, [QuerySpan(tables[0], 0, N)], tokens[1:])
    spans = [QuerySpan(tables[1], 0, 33), QuerySpan(tables[2], 0, N)]
    together = draft.forward(torch.cat((features[:33], features)), spans, tokens[1:34] + tokens[1:])
    assert torch.equal(together, torch.cat((alone[:33], alone)))


def test_captured_layers(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target", layers=9)
    folder = write_tiny_eagle3(tmp_path / "head", target)
    rig = Rig(target)
    plain = read_head(folder, rig.config)
    assert plain.capture_layers == (2, 4, 6)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}
    (folder / "config.json").write_text(json.dumps(config))
    changed = read_head(folder, rig.config)
    assert changed.capture_layers == (2, 4, 9)
    assert changed.fingerprint != plain.fingerprint


def test_other_spellings_load_the_same_head(tmp_path: Path, tokens: list[int]) -> None:
    """`model.` prefixes, `layers.0.` for the one layer, and a config that states the target's depth."""
    target = write_tiny_llama(tmp_path / "target")
    folder = write_tiny_eagle3(tmp_path / "head", target)
    rig = Rig(target)
    features = torch.randn(N, 64)
    plain = HeadRig(folder, rig).forward(features, [QuerySpan(rig.table(N), 0, N)], tokens[1:])
    stored = load_file(folder / "model.safetensors")
    renamed = {"model." + k.replace("midlayer.", "layers.0."): v for k, v in stored.items()}
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
    again = HeadRig(folder, rig).forward(features, [QuerySpan(rig.table(N), 0, N)], tokens[1:])
    assert torch.equal(plain, again)


def test_fc_norm_scales_each_captured_state(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target")
    folder = write_tiny_eagle3(tmp_path / "head", target)
    stored = load_file(folder / "model.safetensors")
    gains = {f"fc_norm.{i}.weight": torch.rand(64) + 0.5 for i in range(3)}
    save_file(stored | gains, folder / "model.safetensors")
    captured = torch.randn(5, 192)
    chunks = [
        F.rms_norm(chunk, (64,), gain, 1e-5)
        for chunk, gain in zip(captured.chunk(3, -1), gains.values(), strict=True)
    ]
    got = HeadRig(folder, Rig(target)).capture.features(captured, torch.arange(5))
    assert close(got, torch.cat(chunks, -1) @ stored["fc.weight"].T)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"d2t": torch.full((100,), 200)}, "d2t .* maps outside"),
        ({"d2t": None}, "no d2t"),
        (
            {"fc.weight": torch.zeros(64, 128)},
            "fc.weight of .*head is \\(64, 128\\), .* \\(64, 192\\)",
        ),
        ({"norm.weight": None}, "no tensor norm.weight"),
    ],
)
def test_a_head_that_cannot_work_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    target = write_tiny_llama(tmp_path / "target")
    folder = write_tiny_eagle3(tmp_path / "head", target, draft_vocab=100)
    stored = load_file(folder / "model.safetensors") | change
    save_file({k: v for k, v in stored.items() if v is not None}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=complaint):
        HeadRig(folder, Rig(target))


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target")
    other = write_tiny_llama(tmp_path / "other", vocab=300)
    with pytest.raises(ConfigError, match="vocab_size is not the target's"):
        HeadRig(write_tiny_eagle3(tmp_path / "head", other), Rig(target))
