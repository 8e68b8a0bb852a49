"""Tokenizers as other files than tokenizer.json describe them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

from tests.unit import tokenizer_families

TEXTS = [*dict.fromkeys(tokenizer_families.LINES), "the cat", "  a   b", "aaaaaaa", "<s>", ""]
PATTERN = r"\s?\p{L}+|\p{N}|[^\p{L}\p{N}]+"


def ranks() -> dict[bytes, int]:
    """All bytes, then pairs of what there is already, as training makes them."""
    known = [bytes([byte]) for byte in range(256)]
    data = [line.encode() for line in TEXTS]
    for line in data:
        for size in (2, 3, 4, 6):
            known += [line[at : at + size] for at in range(0, len(line) - size, 3)]
    return {token: rank for rank, token in enumerate(dict.fromkeys(known))}


def tekken(folder: Path, special: list[str] | None) -> dict[bytes, int]:
    known = ranks()
    entries = [{"rank": rank, "token_bytes": base64.b64encode(t).decode()} for t, rank in known.items()]
    config = {"pattern": PATTERN, "default_vocab_size": len(known) + 30, "default_num_special_tokens": 30}
    file: dict[str, Any] = {"config": config, "vocab": entries + entries[:5]}
    if special is not None:
        file["special_tokens"] = [{"rank": rank, "token_str": name} for rank, name in enumerate(special)]
    (folder / "tekken.json").write_text(json.dumps(file))
    return known


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<own>", 0.0, 4)]
BYTES = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
WORDS = [("ab", -1.0), ("▁ab", -2.0), ("abab", -2.5), ("▁", -3.0), ("a", -4.0), ("b", -5.0)]


def sentence_model(folder: Path, kind: int, *, prefix: bool = True) -> None:
    """Writes a tokenizer.model: 1 is Unigram, 2 BPE."""

    def field(number: int, value: bytes | int) -> bytes:
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    def varint(value: int) -> bytes:
        low = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
        return bytes([*(byte | 0x80 for byte in low[:-1]), low[-1]])

    made = b""
    for text, score, piece in (*PIECES, *BYTES, *((text, score, 1) for text, score in WORDS)):
        score_field = varint(2 << 3 | 5) + struct.pack("<f", score)
        made += field(1, field(1, text.encode()) + score_field + field(3, piece))
    made += field(2, field(3, kind) + field(35, 1))
    made += field(3, field(3, int(prefix)) + field(4, 0))
    (folder / "tokenizer.model").write_bytes(made)
