"""Tokenizers that SentencePiece trained, by BPE or Unigram: its tokenizer.model, a protobuf message.

It reads the few fields that say how a text is encoded. A piece which cannot be made by merging (a control or
unknown piece, a byte) is never made so. Other kinds of model are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from eyas.common.errors import ConfigError

_SPACE = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _OWN = 1, 2, 3, 4  # kinds of pieces; _OWN: a symbol that its maker named
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class _VocabularyPiece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class _PieceModel:
    pieces: list[_VocabularyPiece]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]

    @property
    def bytes_fall_back(self) -> bool:
        """Whether characters that have no piece are written as bytes."""
        return bool(self.trainer.get(35, 0))

    @property
    def begins_with_space(self) -> bool:
        """Whether a space is put in front of a text."""
        return bool(self.normalizer.get(3, 1))


def of_model(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Reads a tokenizer.model. `config`: tokenizer_config.json, which may say that a text has no begin token
    (add_bos_token), or has an end token (add_eos_token).
    """
    model = _read(path)
    kind = model.trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ConfigError(f"{path} is neither BPE nor Unigram, and other kinds are not read", param="model")
    made = Tokenizer(_bpe(model) if kind == _BPE else _unigram(model))
    first_only = config.get("legacy") is False and model.begins_with_space
    made.normalizer = _normalizer(model, prefix=model.begins_with_space and not first_only)
    if first_only:
        made.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    fall_back = [decoders.ByteFallback()] if model.bytes_fall_back else []
    strip = [decoders.Strip(" ", 1, 0)] if model.begins_with_space else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), *fall_back, decoders.Fuse(), *strip])
    named = [piece for piece in model.pieces if piece.kind in (_CONTROL, _UNKNOWN, _OWN)]
    made.add_tokens([AddedToken(piece.text, special=piece.kind != _OWN, normalized=False) for piece in named])
    _surround(made, model, config)
    return made


def _bpe(model: _PieceModel) -> models.BPE:
    joined = {
        piece.text: piece.score
        for piece in model.pieces
        if piece.kind == _NORMAL or (piece.kind == _OWN and _SPACE in piece.text)
    }
    merges = []
    for text, score in joined.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in joined and right in joined:
                merges.append((-score, -at, left, right))
    return models.BPE(
        vocab={piece.text: id for id, piece in enumerate(model.pieces)},
        merges=[(left, right) for *_, left, right in sorted(merges)],
        unk_token=next((piece.text for piece in model.pieces if piece.kind == _UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=model.bytes_fall_back,
    )


def _unigram(model: _PieceModel) -> models.Unigram:
    unknown = next((id for id, piece in enumerate(model.pieces) if piece.kind == _UNKNOWN), None)
    scores = [(piece.text, piece.score) for piece in model.pieces]
    return models.Unigram(scores, unk_id=unknown, byte_fallback=model.bytes_fall_back)


def _normalizer(model: _PieceModel, *, prefix: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if characters := model.normalizer.get(2):
        steps.append(normalizers.Precompiled(characters))
    if model.normalizer.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _surround(made: Tokenizer, model: _PieceModel, config: Mapping[str, Any]) -> None:
    """Gives texts the begin and end tokens that the model expects."""
    names = []
    for name, field, usual, default in (("bos", 41, 1, True), ("eos", 42, 2, False)):
        id = _signed(model.trainer.get(field, usual))
        entry = config.get(f"{name}_token")
        text = entry["content"] if isinstance(entry, dict) else entry
        text = text or (model.pieces[id].text if 0 <= id < len(model.pieces) else None)
        is_added = config.get(f"add_{name}_token", default)
        names.append(text if is_added and text is not None and made.token_to_id(text) is not None else "")
    single = " ".join(part for part in (names[0], "$A", names[1]) if part)
    if single != "$A":
        tokens = [(name, made.token_to_id(name)) for name in dict.fromkeys(names) if name]
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)


# --- the message -----------------------------------------------------------------------------------------


def _read(path: Path) -> _PieceModel:
    """Raises ConfigError for a file that is not SentencePiece's."""
    try:
        top = list(_fields(path.read_bytes()))
        pieces = [_piece(dict(_fields(value))) for number, value in top if number == 1]
        specs = {number: dict(_fields(value)) for number, value in top if number in (2, 3)}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error):
        pieces, specs = [], {}
    if not pieces:
        raise ConfigError(f"{path} is no SentencePiece model", param="model")
    return _PieceModel(pieces, specs.get(2, {}), specs.get(3, {}))


def _piece(fields: dict[int, Any]) -> _VocabularyPiece:
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    return _VocabularyPiece(fields[1].decode(), score, fields.get(3, _NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: whole numbers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        else:
            length = {1: 8, 5: 4}[wire]
        if at + length > len(data):
            raise ValueError("a field is cut off")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
