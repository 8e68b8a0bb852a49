"""Tokenizers whose tokens are bytes or parts of characters."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer


@cache
def byte_level() -> HFTokenizer:
    """A small byte-level BPE whose merges cut through characters of several bytes."""
    hf = HFTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    hf.train_from_iterator(["the cat naïve 日本語 日曜 \U0001f642\U0001f680 été"] * 4, trainer)
    hf.add_tokens([AddedToken("<think>", special=False)])
    return hf


@cache
def byte_fallback() -> HFTokenizer:
    """A SentencePiece-like tokenizer: marked spaces, unknown characters as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    hf = HFTokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return hf
