"""The bytes that each id of a model's vocabulary writes.

It reads the tokenizer's files, and needs neither torch nor transformers. Special tokens write no text:
an output with a grammar cannot hold their names by accident.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.json_object import read_json_object
from eyas.common.tokenizers.decoders import compile_decoder, decoder_of
from eyas.common.tokenizers.source import read_tokenizer

_NO_TEXT = b"\xff"
"""The first byte of a special token's stand-in: no text holds it, so only its id can be asked for."""


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
