"""Writes folders for `--load-format dummy`: a known model's sizes, and an invented tokenizer.

    python -m eyas.bench.shapes llama-3.1-8b DIR [--head DIR] [--block-head DIR]

Speed depends on sizes alone, so a server is measured without a download. The tokenizer has as many entries as
the model; its words mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIALS = 256
BEGIN, END, START_HEADER, END_HEADER, END_OF_TURN = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
NAMED = {0: BEGIN, 1: END, 6: START_HEADER, 7: END_HEADER, 9: END_OF_TURN}  # by place among the special ones
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{START_HEADER}{{{{ message['role'] }}}}{END_HEADER}\n\n{{{{ message['content'] }}}}{END_OF_TURN}"
    "{% endfor %}{% if add_generation_prompt %}"
    f"{START_HEADER}assistant{END_HEADER}\n\n"
    "{% endif %}"
)
SPACE = "Ġ"  # as byte-level tokens write it
SYLLABLES = list(itertools.product("bcdfghjklmnpqrstvwxyz", "aeiou"))


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama and of its heads: EAGLE-3's is one of its layers over twice the width, DFlash's is a
    few of its layers.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 128256
    draft_vocab: int = 32000
    context: int = 131072
    block_layers: int = 5


SHAPES = {
    "llama-3.1-8b": ModelShape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8),
    "llama-3.1-70b": ModelShape(hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8),
    "tiny": ModelShape(64, 128, 8, 4, 2, head_dim=16, vocab=2048, draft_vocab=512, context=1024),  # for a CPU
}


def write_model(shape: ModelShape, folder: Path) -> None:
    """Writes config.json, generation_config.json, tokenizer.json and tokenizer_config.json."""
    tokenizer = invented_tokenizer(shape.vocab)
    begin, *ends = (tokenizer.token_to_id(name) for name in (BEGIN, END, END_OF_TURN))
    ids = {"bos_token_id": begin, "eos_token_id": ends}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(shape, "LlamaForCausalLM", shape.layers) | ids)
    _write_json(folder / "generation_config.json", ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END_OF_TURN}
    _write_json(
        folder / "tokenizer_config.json",
        names | {"model_max_length": shape.context, "chat_template": CHAT_TEMPLATE},
    )


def write_head(shape: ModelShape, folder: Path) -> None:
    """Writes config.json of an EAGLE-3 head for the model of this shape."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(shape, "LlamaForCausalLMEagle3", layers=1)
    _write_json(folder / "config.json", config | {"draft_vocab_size": shape.draft_vocab})


def write_block_head(shape: ModelShape, folder: Path, size: int = 8, draft_vocab: int | None = None) -> None:
    """Writes config.json of a DFlash head that drafts size - 1 tokens at once, by the model's own output head
    or one of `draft_vocab` ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last, count = shape.layers - 3, shape.block_layers
    layers = [1 + round(i * (last - 1) / (count - 1)) for i in range(count)]
    own = {"block_size": size, "mask_token_id": shape.vocab - 1, "target_layer_ids": layers}
    config = _config(shape, "DFlashDraftModel", count) | {"dflash_config": own}
    _write_json(folder / "config.json", config | {"draft_vocab_size": draft_vocab})


def invented_tokenizer(size: int) -> Tokenizer:
    """Byte-level BPE of `size` entries: 256 bytes, invented words, 256 special tokens, in this order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(invented_merges(), size - len(letters) - SPECIALS))
    entries = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [NAMED.get(i, f"<|reserved_special_token_{i}|>") for i in range(SPECIALS)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    begin = (BEGIN, len(entries))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return tokenizer


def invented_merges() -> Iterator[tuple[str, str]]:
    """Endless merges: letters into syllables, then a space and more and more syllables into words."""
    yield from SYLLABLES
    words = [SPACE]
    while True:
        pairs = [(word, "".join(syllable)) for word in words for syllable in SYLLABLES]
        yield from pairs
        words = ["".join(pair) for pair in pairs]


def _config(shape: ModelShape, architecture: str, layers: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eyas.bench.shapes", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="the model's")
    parser.add_argument("--head", type=Path, metavar="DIR", help="also an EAGLE-3 head's")
    parser.add_argument("--block-head", type=Path, metavar="DIR", help="also a DFlash head's, of blocks of 8")
    args = parser.parse_args(argv)
    write_model(SHAPES[args.shape], args.folder)
    if args.head:
        write_head(SHAPES[args.shape], args.head)
    if args.block_head:
        write_block_head(SHAPES[args.shape], args.block_head)
    return 0


if __name__ == "__main__":
    sys.exit(main())
