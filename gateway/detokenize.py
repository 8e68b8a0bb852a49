"""Token ids to text as they arrive, never half a character.

Every token stands for some bytes; text is those bytes put together. A `TokenBytes` table holds the bytes
of each id, a `Detokenizer` feeds them to an incremental UTF-8 decoder, which keeps an unfinished character
to itself. Whatever way a list of ids is cut into pieces, the pieces of text join to the same string as
decoding it at once. It knows the decoders of byte-level BPE and of SentencePiece-like tokenizers with
byte fallback. It refuses to know requests and stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from eyas.common.errors import ConfigError

_CONTEXT = 16  # tokens before a text that may change how it begins
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """What each id contributes to the text, in bytes: nothing for special tokens and unknown ids."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        """Raises ConfigError if the tokenizer's decoder is neither byte-level nor byte-fallback."""
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        to_bytes = _piece_decoder(decoder)
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        self._names = [""] * len(self._table)
        for piece, id in vocabulary.items():
            self._table[id] = to_bytes(piece)
            self._names[id] = piece
        self._shown = list(self._table)
        for id, token in added.items():
            if token.special:
                self._table[id] = b""
        # SentencePiece writes a space before the first word; decoding takes one away again.
        self.drops_first_space = _strips_first_space(decoder)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, id: int) -> bytes:
        return self._table[id] if 0 <= id < len(self._table) else b""

    def join(self, ids: Sequence[int], *, special: bool = False) -> bytes:
        """What `ids` contribute together, special tokens included or not."""
        table, known = self._shown if special else self._table, len(self._table)
        return b"".join([table[id] for id in ids if 0 <= id < known])

    def label(self, id: int) -> tuple[str, bytes]:
        """How one token is shown by itself: its text (special tokens by name), and the bytes of that."""
        data = self[id]
        if not data and 0 <= id < len(self._names):
            data = self._names[id].encode()
        return data.decode("utf-8", "replace"), data


class Detokenizer:
    """The text of one choice, as its tokens come."""

    def __init__(
        self, table: TokenBytes, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """The text goes on where that of `context` ends; without one it begins anew."""
        self._table = table
        self._special = not skip_special_tokens
        self._begun = b""  # the bytes of a character that is not whole yet
        self._drop_space = table.drops_first_space
        self.feed(context[-_CONTEXT:])

    def feed(self, ids: Sequence[int]) -> str:
        """The characters that these tokens completed (often one word each, sometimes none)."""
        return self._decode(self._table.join(ids, special=self._special), final=False)

    def flush(self) -> str:
        """Ends the text: a character still unfinished becomes U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._begun + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._begun = data[used:]
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def _piece_decoder(decoder: dict[str, Any]) -> Callable[[str], bytes]:
    """The function from a vocabulary entry to bytes that this tokenizer.json decoder stands for."""
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level
    if "ByteFallback" in kinds:
        replaced = [(s["pattern"]["String"], s["content"]) for s in steps if s.get("type") == "Replace"]
        return lambda piece: _byte_fallback(piece, replaced)
    raise ConfigError(f"the tokenizer's decoder ({' + '.join(map(str, kinds))}) is not supported")


def _strips_first_space(decoder: dict[str, Any]) -> bool:
    return any(
        step.get("type") == "Strip" and step["content"] == " " and step["start"] == 1
        for step in decoder.get("decoders", [])
    )


def _byte_level(piece: str) -> bytes:
    """Undoes the printable alphabet of byte-level BPE; an entry outside of it (an added token) is itself."""
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_fallback(piece: str, replaced: list[tuple[str, str]]) -> bytes:
    if match := _FALLBACK_BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    for pattern, content in replaced:
        piece = piece.replace(pattern, content)
    return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE shows printable Latin-1 bytes as themselves and the others as U+0100, U+0101, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
