"""The bytes that each id of a model's vocabulary writes, and the text that each piece adds behind others.

It reads the tokenizer's files, and needs neither torch nor transformers. Special tokens write no text: an
output with a grammar cannot hold their names by accident. Where a text is its pieces' bytes one after the
other, as with byte-level and SentencePiece models, the bytes are all that is needed to stream it. Other
decoders look at a piece's neighbours: their texts are streamed by the `tokenizers` library itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.model_folder import read_json_object
from eyas.common.tokenizers.source import read_tokenizer

_NO_TEXT = b"\xff"
"""The first byte of a special token's stand-in: no text holds it, so only its id can be asked for."""
Step = dict[str, Any]  # one decoder as tokenizer.json writes it

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def pieces(folder: Path) -> list[bytes]:
    """Returns, by id, the bytes that it adds to a text; empty where the vocabulary has holes.

    Raises InvalidRequest if the folder has no tokenizer, or one whose texts are only known at their end.
    """
    try:
        tokenizer = read_tokenizer(folder)
    except ConfigError as error:
        message = f"the model has no tokenizer that can be read: {error.message}"
        raise InvalidRequest(message, param="grammar") from None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    decoder = compile_decoder(decoder_of(tokenizer), vocabulary)
    if decoder is None:
        message = "this model's tokenizer tells a text at its end only, so no output can be held to a grammar"
        raise InvalidRequest(message, param="grammar")
    special = _special(tokenizer, folder)
    texts = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for name, id in vocabulary.items():
        texts[id] = _NO_TEXT + name.encode() if name in special else decoder.piece(name)
    return texts


def _special(tokenizer: Tokenizer, folder: Path) -> set[str]:
    """Names of the special tokens. Older folders have the mark in tokenizer_config.json alone."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    config = folder / "tokenizer_config.json"
    added = read_json_object(config).get("added_tokens_decoder", {}) if config.exists() else {}
    return special | {entry["content"] for entry in added.values() if entry.get("special")}


@dataclass(frozen=True)
class PieceDecoder:
    """The bytes that a piece adds behind others. `joined`: a text is these bytes joined, and its first
    `stripped[1]` characters go where they are `stripped[0]`. Otherwise neighbours count.
    """

    piece: Callable[[str], bytes]
    joined: bool = True
    stripped: tuple[str, int] = ("", 0)


def decoder_of(tokenizer: Tokenizer) -> Step | None:
    """A tokenizer's decoder as tokenizer.json writes it; the vocabulary beside it takes a second to write."""
    if tokenizer.decoder is None:
        return None
    step: Step = json.loads(tokenizer.decoder.__getstate__())
    return step


def compile_decoder(decoder: Step | None, vocabulary: Iterable[str]) -> PieceDecoder | None:
    """Compiles a decoder into the text of each piece; None if a text is known at its end alone.

    `vocabulary`: every piece that the tokenizer can give.
    """
    if decoder is None:  # pieces are joined with spaces
        return PieceDecoder(lambda piece: b" " + piece.encode(), joined=False)
    steps = list(_flat(decoder))
    match steps:
        case [{"type": "Metaspace" | "WordPiece"}]:  # no space before the text's first piece
            library = _loaded(steps[0])
            return PieceDecoder(lambda piece: library.decode(["", piece]).encode(), joined=False)
        case [{"type": "BPEDecoder", "suffix": suffix}] if _ends_words(suffix, vocabulary):
            return PieceDecoder(lambda piece: piece.replace(suffix, " ").encode(), joined=False)
    changing = list(takewhile(lambda step: step["type"] == "Replace", steps))
    to_bytes, stripped = _joining(steps[len(changing) :])
    if to_bytes is None:
        return None
    return PieceDecoder(_composed([_loaded(step) for step in changing], to_bytes), stripped=stripped)


def _flat(decoder: Step) -> Iterator[Step]:
    """The steps of a decoder, sequences of sequences resolved."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _flat(step)


def _ends_words(suffix: str, vocabulary: Iterable[str]) -> bool:
    """Whether `suffix` stands only where words end, and no piece ends with the space that it becomes."""
    return bool(suffix) and all(
        suffix not in piece.removesuffix(suffix) and not piece.endswith(" ") for piece in vocabulary
    )


def _joining(steps: Sequence[Step]) -> tuple[Callable[[str], bytes] | None, tuple[str, int]]:
    """How steps that join pieces turn one into bytes (None: not one by one). Then what the start of a text
    loses.
    """
    to_bytes: Callable[[str], bytes] = str.encode
    match steps:
        case [{"type": "ByteLevel"}, *rest]:
            to_bytes = _byte_level
        case [{"type": "ByteFallback"}, {"type": "Fuse"}, *rest]:
            to_bytes = _byte_fallback
        case [{"type": "ByteFallback"}]:
            to_bytes, rest = _byte_fallback, []
        case [{"type": "Fuse"}, *rest]:
            pass
        case rest:
            return (None if rest else to_bytes), ("", 0)
    match [step for step in rest if step["type"] != "Fuse"]:
        case []:
            return to_bytes, ("", 0)
        case [{"type": "Strip", "content": content, "start": start, "stop": 0}]:
            return to_bytes, (content, start)
    return None, ("", 0)


def _composed(steps: Sequence[decoders.Decoder], to_bytes: Callable[[str], bytes]) -> Callable[[str], bytes]:
    def contribution(piece: str) -> bytes:
        for step in steps:
            piece = step.decode([piece])
        return to_bytes(piece)

    return contribution


def _loaded(step: Step) -> decoders.Decoder:
    """The library's decoder. Only unpickling makes one from JSON without a whole tokenizer."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(step).encode())
    return decoder


def _byte_level(piece: str) -> bytes:
    """Undoes the printable alphabet of byte-level BPE; an entry outside of it (an added token) is itself."""
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    match = _FALLBACK_BYTE.fullmatch(piece)
    return piece.encode() if match is None else bytes([int(match[1], 16)])


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE shows printable Latin-1 bytes as themselves and the others as U+0100, U+0101, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
