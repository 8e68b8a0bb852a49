"""Folders without weights: the tokenizer holds what it promises, and a server takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eyas import cli, configuration
from eyas.bench import shapes
from eyas.cluster.checks import check_draft, check_model
from eyas.engine.attention.torch_backend import TorchAttention
from eyas.engine.checkpoint.config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.weights import DummyWeights
from eyas.engine.kv.pool import PoolShape
from eyas.engine.models import llama
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.eagle3 import Eagle3Draft, Eagle3Tap
from eyas.engine.models.heads import read_head
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.models.table import read_model
from gateway.text.tokenizer import Tokenizer

TEXT = "Naïve café: 12 × 3 = 36, fo bafebo 日本語\n\t\x00 <|eot|>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and its head."""
    path = tmp_path_factory.mktemp("shapes")
    assert shapes.main(["tiny", str(path / "model"), "--head", str(path / "head")]) == 0
    return path / "model", path / "head"


@pytest.mark.parametrize("size", [2048, pytest.param(128256, marks=pytest.mark.slow)])
def test_every_id_is_a_token_and_any_text_comes_back(size: int) -> None:
    tokenizer = Tokenizer(hf := shapes.invented_tokenizer(size))
    assert hf.get_vocab_size() == len(hf.get_vocab()) == size
    assert set(hf.get_vocab().values()) == set(range(size))
    ids = tokenizer.encode(TEXT)
    assert ids[0] == hf.token_to_id(shapes.BEGIN) == size - shapes.SPECIALS
    assert tokenizer.decode(ids) == TEXT
    words = [hf.decode([i]) for i in range(256 + 105, size - shapes.SPECIALS, 997)]
    assert all(len(hf.encode(word, add_special_tokens=False).ids) == 1 for word in words), "words are reached"


def test_a_chat_is_rendered_and_ends(folders: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer.load(folders[0])
    hf = json.loads((folders[0] / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in hf["added_tokens"]}
    ids = tokenizer.encode("<|start_header_id|>", special=False)
    assert ids == (special["<|start_header_id|>"],)
    assert tokenizer.template is not None
    turns = tokenizer.template.render([{"role": "user", "content": "fo"}])
    assert turns == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nfo<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert special["<|eot_id|>"] in read_model(folders[0], "dummy").eos_token_ids


def test_the_8b_shape_is_the_published_one(tmp_path: Path) -> None:
    shape = shapes.SHAPES["llama-3.1-8b"]
    raw = shapes._config(shape, "LlamaForCausalLM", shape.layers)
    config = llama.describe(raw, tmp_path)
    rope = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert config == ModelConfig(
        folder=tmp_path,
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        norm_eps=1e-5,
        layers=(LayerSpec(AttentionSpec(32, 8, 128, rope, 128**-0.5), FeedForwardSpec(14336)),) * 32,
        context_length=131072,
        tied_head=False,
    )
    shapes.write_head(shape, tmp_path)
    head = read_head(tmp_path, config, "dummy")
    assert (head.draft_vocab_size, head.decoder.vocab_size, head.decoder.num_layers) == (32000, 128256, 1)
    assert (head.decoder.hidden_size, head.decoder.layers[0].feed_forward.width) == (4096, 14336)
    shapes.write_block_head(shape, tmp_path)
    head = read_head(tmp_path, config, "dummy")
    assert (head.algorithm, head.outputs, head.decoder.num_layers) == ("dflash", 128256, 5)
    assert head.block is not None and head.block.most == 7
    assert head.capture_layers == (2, 9, 16, 23, 30)


def test_a_server_takes_the_folders(folders: tuple[Path, Path]) -> None:
    model, head = map(str, folders)
    flags = ["serve", "--load-format", "dummy", "--model", model, "--draft", head]
    config = configuration.engine_config(cli._parser().parse_args(flags))
    check_model(config.model, config.load_format)
    check_draft(config.draft, config.load_format)
    target = read_model(config.model, config.load_format)
    draft = read_head(head, target, config.load_format)
    assert target.fingerprint != draft.fingerprint


def test_a_dummy_model_and_its_head_are_built(folders: tuple[Path, Path]) -> None:
    target = read_model(folders[0], "dummy")
    draft = read_head(folders[1], target, "dummy")
    shape = PoolShape(target.kv_format, 8, 16)
    backend = TorchAttention.of(target, shape)
    model = Decoder(target, DummyWeights(), TorchMachine(target, backend))
    weights = DummyWeights(optional=draft.dummy_tensors)
    backend = TorchAttention.of(draft.decoder, PoolShape(draft.pool_format(16), 8, 16))
    machine = TorchMachine(draft.decoder, backend)
    Eagle3Tap(draft, weights, machine)
    head = Eagle3Draft(draft, weights, model.ends, machine)
    assert head.logits(torch.randn(3, target.hidden_size)).shape == (3, 512)
    assert head.token_map is not None and head.token_map.tolist() == list(range(512))
