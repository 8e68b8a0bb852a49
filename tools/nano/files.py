"""Reads and writes the embedded model and its head as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from eyas.train.heads.eagle3 import Eagle3Head
from eyas.train.model import LlamaShape
from eyas.train.saving import DTYPE, save_tensors, sizes_of, write_json
from tools.nano.head import head_of, head_shape
from tools.nano.model import NanoModel
from tools.nano.tokenizer import END_OF_TEXT_ID, IM_END_ID

STOP = (IM_END_ID, END_OF_TEXT_ID)
ENDS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": list(STOP), "pad_token_id": END_OF_TEXT_ID}


def save_target(model: NanoModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and the weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    write_json(folder / "config.json", {**architecture, **sizes_of(model.config), **ENDS, **DTYPE})
    write_json(folder / "generation_config.json", ENDS)
    save_tensors(model, "model.", folder)


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Writes the embedded model's draft head: its config.json and its weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "draft_vocab_size": head.shape.vocab,
    }
    write_json(folder / "config.json", {**architecture, **sizes_of(head.shape), **ENDS, **DTYPE})
    save_tensors(head, "", folder)


def read_config(folder: Path) -> LlamaShape:
    """The shape that config.json describes."""
    raw = json.loads((folder / "config.json").read_text())
    return LlamaShape(
        hidden=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        intermediate=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        context=raw["max_position_embeddings"],
        rope_theta=raw["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )


def load_target(folder: Path, device: str) -> NanoModel:
    """The target, with float32 weights on `device`."""
    model = NanoModel(read_config(folder))
    tensors = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return model.to(device)


def load_head(folder: Path, target: NanoModel) -> Eagle3Head:
    """The head of a target, with float32 weights on the target's device.

    Raises ValueError if it does not fit the target.
    """
    head = head_of(target)
    head.load_state_dict(load_file(str(folder / "model.safetensors")))
    if read_config(folder) != head_shape(target.config):
        raise ValueError(f"the head in {folder} does not fit this target")
    return head.to(target.embed_tokens.weight.device)
