"""Small tokenizers of the families that models come with, trained here on a few lines of text.

Each has the special tokens "<s>" and "<unk>", and the ordinary added token "<think>".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from eyas.common.config import NANO

LINES = [
    "the cat sat on the mat, didn't it? yes! it's 'fine' ... and they've gone .",
    "naïve été façade Ünïcödé straße 1234567890 3.14 a_b-c {x: [1, 2]}",
    "日本語の文章 中文字符 한국어 кошка قطة हिन्दी ไทย",
    "emoji \U0001f642\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 o\u0308",
    "\n\n\tdef f(x):\n    return x\n",
] * 4
SPECIALS = ["<s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _trained(hf: Tokenizer, trainer: Any) -> Tokenizer:
    hf.train_from_iterator(LINES, trainer)
    hf.add_tokens([AddedToken("<think>", special=False)])
    return hf


def _bytes_bpe(hf: Tokenizer) -> Tokenizer:
    hf.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    return _trained(hf, trainer)


def gpt2() -> Tokenizer:
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _bytes_bpe(hf)


def qwen() -> Tokenizer:
    hf = Tokenizer(models.BPE())
    hf.normalizer = normalizers.NFC()
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _bytes_bpe(hf)


def deepseek() -> Tokenizer:
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(r"\s?[A-Za-z]+|\s+$|[\r\n]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf = _bytes_bpe(hf)
    hf.add_tokens([AddedToken("<｜User｜>", special=False)])
    return hf


def _sentencepiece(hf: Tokenizer) -> Tokenizer:
    """Merges over marked words, and a byte for every character that has no piece."""
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=[*SPECIALS, *BYTES], limit_alphabet=60, show_progress=False
    )
    hf.train_from_iterator(LINES, trainer)
    model = json.loads(hf.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    hf.model = models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    fresh = Tokenizer.from_str(hf.to_str())
    spec = json.loads(fresh.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in SPECIALS]
    fresh = Tokenizer.from_str(json.dumps(spec))
    fresh.add_tokens([AddedToken("<think>", special=False)])
    return fresh


def llama2() -> Tokenizer:
    hf = Tokenizer(models.BPE(unk_token="<unk>"))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _sentencepiece(hf)


def mistral() -> Tokenizer:
    """The same without the legacy: only the first word of a text gets a space."""
    hf = Tokenizer(models.BPE(unk_token="<unk>"))
    hf.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _sentencepiece(hf)


def gemma() -> Tokenizer:
    hf = Tokenizer(models.BPE(unk_token="<unk>"))
    hf.normalizer = normalizers.Replace(" ", "▁")
    hf.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    hf.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _sentencepiece(hf)


def t5() -> Tokenizer:
    hf = Tokenizer(models.Unigram())
    hf.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    hf.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    hf.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    return _trained(hf, trainer)


def bert() -> Tokenizer:
    hf = Tokenizer(models.WordPiece(unk_token="<unk>"))
    hf.normalizer = normalizers.BertNormalizer(lowercase=True)
    hf.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    hf.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    return _trained(hf, trainer)


def clip() -> Tokenizer:
    hf = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    hf.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    hf.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    hf.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, end_of_word_suffix="</w>", show_progress=False
    )
    return _trained(hf, trainer)


def words() -> Tokenizer:
    """No decoder at all."""
    hf = Tokenizer(models.WordLevel(unk_token="<unk>"))
    hf.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(hf, trainers.WordLevelTrainer(special_tokens=SPECIALS, show_progress=False))


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: cache(make)
    for make in (gpt2, qwen, deepseek, llama2, mistral, gemma, t5, bert, clip, words)
}
WHOLE_BYTES = ("gpt2", "qwen", "deepseek", "llama2", "mistral", "gemma")  # a token may be part of a character


def write_folder(family: str, folder: Path, **config: Any) -> Path:
    """A model's folder, as far as tokenizers read it."""
    FAMILIES[family]().save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


def write_tokenizer(folder: Path, more: int = 0, **settings: object) -> Path:
    """The embedded model's, but two letters have each other's ids, and `more` tokens follow."""
    folder.mkdir(exist_ok=True)
    told = json.loads((NANO / "tokenizer.json").read_text())
    ids = told["model"]["vocab"]
    ids["Y"], ids["Z"] = ids["Z"], ids["Y"]
    first = len(ids)
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    told["added_tokens"] += [{"id": first + i, "content": f"<|more_{i}|>", **usual} for i in range(more)]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    config = json.loads((NANO / "tokenizer_config.json").read_text()) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
