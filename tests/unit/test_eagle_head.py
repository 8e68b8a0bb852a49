"""EAGLE-1/2 heads against their equations, in each public naming; and the folders that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.folder import weight_files
from tests.unit.head_chain import NOTICED, SAME, N, worst_difference
from tests.unit.head_equations import Eagle
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import edit, write_tiny_eagle, write_tiny_eagle3, write_tiny_llama

LAYERS = 5  # of the target
Folders = tuple[Path, Path]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    target = write_tiny_llama(tmp_path / "target", layers=LAYERS, rope=rope, tied=False)
    return target, write_tiny_eagle(tmp_path / "head", target)


@pytest.mark.parametrize(("layers", "bias"), [(1, True), (1, False), (2, True)])
def test_a_head_computes_its_equations(tmp_path: Path, folders: Folders, layers: int, bias: bool) -> None:
    target = folders[0]
    head = write_tiny_eagle(tmp_path / "other", target, layers=layers, bias=bias)
    assert worst_difference((target, head), Eagle(head, target), (LAYERS,)) < SAME


MISTAKES = (
    "the feature before the norm",
    "the feature first",
    "no bias",
    "a norm before the first layer",
    "a norm at the end",
    "the target's rope_theta",
)


@pytest.mark.parametrize("wrong", MISTAKES)
def test_the_comparison_notices(folders: Folders, wrong: str) -> None:
    target, head = folders
    assert worst_difference(folders, Eagle(head, target, wrong), (LAYERS,)) > NOTICED


def test_the_comparison_notices_late_drafts_and_other_taps(folders: Folders) -> None:
    target, head = folders
    assert worst_difference(folders, Eagle(head, target), (LAYERS,), late=1) > NOTICED
    assert worst_difference(folders, Eagle(head, target), (LAYERS - 1,)) > NOTICED


def test_the_feature_is_what_the_targets_head_reads(folders: Folders) -> None:
    target, head = folders
    rig = Rig(target)
    tap, residual = HeadRig(head, rig).capture, torch.randn(5, 64)
    logits = rig.model.logits(residual)
    assert torch.allclose(rig.model.ends.lm_head(tap.features(residual, torch.arange(5))), logits)
    assert tap.layers == (LAYERS,)


def test_a_repackaged_head_is_the_same(tmp_path: Path, folders: Folders) -> None:
    """With prefixes, another architecture, a copy of the target's ends, and buffers that old files hold."""
    target, head = folders
    paper = Eagle(head, target)
    extra = {"lm_head.weight": paper.lm_head, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(
        head,
        extra | {"embed_tokens.weight": paper.embedding},
        lambda name: name if name == "lm_head.weight" else f"model.{name}",
        architectures=["LlamaForCausalLMEagle"],
        num_hidden_layers=LAYERS,
    )
    assert worst_difference(folders, paper, (LAYERS,)) < SAME


def test_a_stored_embedding_is_the_heads(folders: Folders) -> None:
    target, head = folders
    edit(head, {"embed_tokens.weight": torch.randn(256, 64)})
    assert worst_difference(folders, Eagle(head, target), (LAYERS,)) < SAME
    wrong = Eagle(head, target, "the target's embedding")
    assert worst_difference(folders, wrong, (LAYERS,)) > NOTICED


def test_biases_of_attention_are_told_by_their_tensors(folders: Folders) -> None:
    """As of heads for Qwen2, whose config.json has no word for them."""
    target, head = folders
    biases = {f"layers.0.self_attn.{p}_proj.bias": torch.randn(64 if p == "q" else 32) for p in "qkv"}
    edit(head, dict(biases))
    assert worst_difference(folders, Eagle(head, target), (LAYERS,)) < SAME


@pytest.mark.parametrize(
    ("tensors", "config", "complaint"),
    [
        ({"layers.0.mlp.up_proj.weight": None}, {}, "head has no tensor layers.0.mlp.up_proj.weight"),
        ({"fc.bias": torch.zeros(63)}, {}, r"tensor fc.bias of .*head is \(63,\), its config says \(64,\)"),
        ({"layers.0.mlp.gate.weight": torch.zeros(4)}, {}, "head: its tensor layers.0.mlp.gate.weight"),
        ({"layers.0.input_layernorm.weight": torch.ones(64)}, {}, "has no layers.0.input_layernorm.weight"),
        ({"norm.weight": torch.ones(64)}, {}, "an EAGLE-1/2 head has no norm.weight, and it has one"),
        (
            {"fc.weight": torch.zeros(64, 192)},
            {},
            "nor an EAGLE-1/2 head nor a P-EAGLE head nor a whole model nor an EAGLE-3 head",
        ),
        (
            {"fc.weight": None},
            {},
            "nor an EAGLE-1/2 head nor a P-EAGLE head nor a whole model nor an EAGLE-3 head",
        ),
        ({}, {"vocab_size": 300}, "head: its vocab_size is not the target's"),
        ({}, {"hidden_size": 48}, "head: its hidden_size is not the target's"),
        ({}, {"sliding_window": 9}, "head: its sliding_window is shorter than the context"),
        ({}, {"intermediate_size": None}, "config.json of .*head holds a value of the wrong kind"),
    ],
)
def test_a_head_that_cannot_work_is_refused(
    folders: Folders, tensors: dict[str, torch.Tensor | None], config: dict[str, object], complaint: str
) -> None:
    target, head = folders
    edit(head, tensors, **config)
    with pytest.raises(ConfigError, match=complaint):
        HeadRig(head, Rig(target))


def test_a_model_may_have_no_head_of_its_own(folders: Folders) -> None:
    """What `--draft mtp` asks for."""
    target, _ = folders
    with pytest.raises(ConfigError, match="it is the model's own folder, and has no MTP layer"):
        HeadRig(target, Rig(target))


@pytest.mark.parametrize("archive", [True, False])
def test_a_head_of_an_older_export_is_converted_once(
    archive: bool, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Official EAGLE heads come as pytorch_model.bin, in the oldest exports without an archive around it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, head = folders
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    torch.save(tensors, head / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    first, again = weight_files(head), weight_files(head)
    assert first == again and first[0].is_relative_to(tmp_path / "cache")
    found = load_file(first[0])
    assert found.keys() == tensors.keys() and all(found[name].equal(tensors[name]) for name in found)
    assert HeadRig(head, Rig(target)).config.algorithm


def test_a_file_that_was_changed_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one size, and changed where no sample of its bytes is taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weight = torch.zeros(1 << 18)
    for value in (1.0, 2.0):
        weight[10_000] = value
        torch.save({"weight": weight}, tmp_path / "pytorch_model.bin")
        assert load_file(weight_files(tmp_path)[0])["weight"][10_000] == value


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (b"no pickle", "is not a PyTorch file of tensors"),
        (b"", "is not a PyTorch file of tensors"),
        (b"\x80\x02a.", "is not a PyTorch file of tensors"),  # appends to a list that there is not
        ({"weight": Path("x")}, "is not a PyTorch file of tensors"),  # more than tensors: it could run code
        ({"weight": 3}, "does not hold tensors by name"),
    ],
)
def test_what_is_no_file_of_tensors_is_refused(
    held: object, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "pytorch_model.bin"
    if isinstance(held, bytes):
        file.write_bytes(held)
    else:
        torch.save(held, file)
    with pytest.raises(ConfigError, match=told):
        weight_files(tmp_path)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_two_kinds_are_told_apart(tmp_path: Path, folders: Folders) -> None:
    """By their tensors: an EAGLE-3 head of two captured layers has an fc of the same shape."""
    target, head = folders
    third = write_tiny_eagle3(tmp_path / "third", target)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}
    edit(third, {"fc.weight": torch.randn(64, 128)}, architectures=["LlamaForCausalLMEagle"], **ids)
    edit(head, architectures=["LlamaForCausalLMEagle3"])
    kinds = [HeadRig(folder, Rig(target)).config.algorithm for folder in (head, third)]
    assert kinds == ["eagle", "eagle3"]


def test_a_head_attends_as_far_as_its_target(folders: Folders) -> None:
    target, head = folders
    edit(head, max_position_embeddings=N // 2)
    assert worst_difference(folders, Eagle(head, target), (LAYERS,)) < SAME


def test_no_flag_moves_the_last_hidden_state(folders: Folders) -> None:
    target, head = folders
    with pytest.raises(ConfigError, match="--draft-capture-layers: .* what leaves the last layer") as refused:
        HeadRig(head, Rig(target), (2,))
    assert refused.value.param == "draft-capture-layers"
