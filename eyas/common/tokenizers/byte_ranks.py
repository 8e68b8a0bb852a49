"""Tokenizers that are a list of byte strings by rank: tiktoken.model of Kimi, tekken.json of Mistral.

Two neighbours become one where their bytes together have the lowest rank. The `tokenizers` library wants
merges: every way in which a token parts into two others is one, in the order of the tokens' ranks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    rf"[\p{{Han}}]+|{_WORD}{_UPPER}*{_LOWER}+{_SHORT}|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI_RESERVED = 256  # ids after the ranks
_TEKKEN_SPECIAL = (  # of files that list none
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
    " [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT]"
    " [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()


def of_kimi(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Reads a tiktoken.model: a line is a token in base 64 and its rank, which is its id.

    The special tokens, whose names `config` (tokenizer_config.json) has, follow.
    """
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    named = {int(id): entry["content"] for id, entry in config.get("added_tokens_decoder", {}).items()}
    first = len(ranks)
    special = {named.get(id, f"<|reserved_token_{id}|>"): id for id in range(first, first + _KIMI_RESERVED)}
    plain = {entry["content"] for entry in config.get("added_tokens_decoder", {}).values()}
    return _tokenizer(ranks, special, _KIMI, later=plain)


def of_tekken(path: Path) -> Tokenizer:
    """Reads a tekken.json: its special tokens have the first ids, its ranks those after them."""
    file = json.loads(path.read_text(encoding="utf-8"))
    config = file["config"]
    before = int(config["default_num_special_tokens"])
    listed = file.get("special_tokens")
    names = _TEKKEN_SPECIAL if listed is None else [token["token_str"] for token in listed]
    special = {name: id for id, name in enumerate(names)}
    special |= {f"<SPECIAL_{id}>": id for id in range(len(names), before)}
    entries = file["vocab"][: int(config["default_vocab_size"]) - before]
    ranks = {base64.b64decode(entry["token_bytes"]): before + int(entry["rank"]) for entry in entries}
    made = _tokenizer(ranks, special, config["pattern"])
    if "<s>" in special:
        begin = ("<s>", special["<s>"])
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return made


def cut(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Cuts a text where `pattern` says, and writes bytes as characters."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _tokenizer(
    ranks: Mapping[bytes, int],
    special: Mapping[str, int],
    pattern: str,
    later: Set[str] = frozenset(),
) -> Tokenizer:
    """`later`: names in `special` that the reader of the folder's other files adds, with their flags."""
    written = {token.decode("latin-1").translate(_CHARACTERS): id for token, id in ranks.items()}
    merges = []
    for token in sorted(written, key=written.__getitem__):
        ways = [
            (written[left], written[right], left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in written and (right := token[at:]) in written
        ]
        merges += [way[2:] for way in sorted(ways)]
    vocabulary = written | dict(special)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    made.pre_tokenizer = cut(pattern)
    made.decoder = decoders.ByteLevel()
    names = [name for name in sorted(special, key=special.__getitem__) if name not in later]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return made


def _characters() -> dict[int, int]:
    """The character that stands for each byte that is no printable one, as GPT-2's tokenizer has it."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {byte: 0x100 + at for at, byte in enumerate(byte for byte in range(256) if byte not in shown)}


_CHARACTERS = _characters()
