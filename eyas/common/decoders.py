"""What the decoder of a tokenizer.json does to the pieces of a text, in a form that streams.

A decoder sees all pieces of a text at once. The work of nearly every decoder has three parts: the bytes that
a piece contributes; those that it contributes as the first piece; and what is then done to the whole text.
This module knows every decoder of the `tokenizers` library, and asks the library what a decoder makes of a
piece. It refuses to know ids, and which tokens are special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer, decoders

from eyas.common.text_stages import Replacer, Stripper, TextStage

Step = dict[str, Any]  # one decoder as tokenizer.json writes it

_PIECEWISE = ("Replace", "Strip", "Metaspace", "WordPiece", "CTC")  # they work on one piece at a time
_FIRST_DIFFERS = ("Metaspace", "WordPiece")  # they write no space before the text's first piece
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class StreamedDecoder:
    """A decoder that streams: bytes per piece, then stages for the whole text.

    `piece` gives the bytes of a piece; `first_piece` those of the text's first piece, if they differ.
    `stages` make the stages of a new text. `distinct`: a piece that equals the one before it is dropped.
    """

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes] | None = None
    stages: tuple[Callable[[], TextStage], ...] = ()
    distinct: bool = False


def decoder_of(tokenizer: Tokenizer) -> Step | None:
    """A tokenizer's decoder as tokenizer.json writes it; the vocabulary beside it takes a second to write."""
    if tokenizer.decoder is None:
        return None
    step: Step = json.loads(tokenizer.decoder.__getstate__())
    return step


def compile_decoder(decoder: Step | None, vocabulary: Iterable[str]) -> StreamedDecoder | None:
    """The streamed form of a decoder; None if its text is only known at the end.

    `vocabulary`: every piece that the tokenizer can give.
    """
    if decoder is None:  # pieces are joined with spaces
        return StreamedDecoder(lambda piece: b" " + piece.encode(), first_piece=str.encode)
    steps = list(_flat(decoder))
    if _kinds(steps) == ["BPEDecoder"] and _ends_words(steps[0]["suffix"], vocabulary):
        steps = _spaced_words(steps[0]["suffix"])
    piecewise = list(takewhile(lambda step: step["type"] in _PIECEWISE, steps))
    whole = steps[len(piecewise) :]
    distinct = "CTC" in _kinds(piecewise)
    if distinct and len(piecewise) > 1:
        return None  # it drops pieces, so the next step cannot know its first piece yet
    first_differs = any(step["type"] in _FIRST_DIFFERS for step in piecewise)
    to_bytes = _joining(_kinds(whole))
    stages = [_stage(step) for step in whole[1:] if step["type"] != "Fuse"]
    if to_bytes is None or None in stages:
        return None
    return StreamedDecoder(
        piece=_composed([_later(step) for step in piecewise], to_bytes),
        first_piece=_composed([_alone(step) for step in piecewise], to_bytes) if first_differs else None,
        stages=tuple(stage for stage in stages if stage is not None),
        distinct=distinct,
    )


def _flat(decoder: Step) -> Iterator[Step]:
    """The steps of a decoder, sequences of sequences resolved."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _flat(step)


def _kinds(steps: Iterable[Step]) -> list[str]:
    return [step["type"] for step in steps]


def _ends_words(suffix: str, vocabulary: Iterable[str]) -> bool:
    """Whether `suffix` stands only where words end, and no piece ends with the space that it becomes."""
    return bool(suffix) and all(
        suffix not in piece.removesuffix(suffix) and not piece.endswith(" ") for piece in vocabulary
    )


def _spaced_words(suffix: str) -> list[Step]:
    """BPEDecoder in other words: a space follows every word but the last."""
    return [
        {"type": "Replace", "pattern": {"String": suffix}, "content": " "},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
    ]


def _joining(kinds: list[str]) -> Callable[[str], bytes] | None:
    """How the first of these steps, which joins pieces, turns one into bytes; None if it cannot stream."""
    match kinds:
        case ["ByteLevel", *_]:
            return _byte_level
        case ["ByteFallback"] | ["ByteFallback", "Fuse", *_]:
            return _byte_fallback
        case [] | ["Fuse", *_]:
            return str.encode
    return None


def _stage(step: Step) -> Callable[[], TextStage] | None:
    """Makes the stage for a step on the whole text; None if it cannot stream."""
    match step:
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return partial(Stripper, content, start, stop)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if pattern:
            return partial(Replacer, pattern, content)
    return None


def _composed(
    forms: Sequence[Callable[[str], str]], to_bytes: Callable[[str], bytes]
) -> Callable[[str], bytes]:
    def contribution(piece: str) -> bytes:
        for form in forms:
            piece = form(piece)
        return to_bytes(piece)

    return contribution


def _alone(step: Step) -> Callable[[str], str]:
    """How a piecewise step changes a text's first piece."""
    if step["type"] == "Strip":  # the library's own panics at pieces shorter than the part to strip
        return lambda piece: Stripper(step["content"], step["start"], step["stop"]).feed(piece)
    decoder = _loaded(step)
    return lambda piece: decoder.decode([piece])


def _later(step: Step) -> Callable[[str], str]:
    """How a piecewise step changes every other piece (shown to the library after an empty one)."""
    if step["type"] not in _FIRST_DIFFERS:
        return _alone(step)
    decoder = _loaded(step)
    return lambda piece: decoder.decode(["", piece])


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
