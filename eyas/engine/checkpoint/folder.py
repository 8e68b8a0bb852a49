"""A model's folder as files: its JSON, its safetensors files and their headers, and a fingerprint of both.

No torch is loaded. What is missing or broken is one `ConfigError`.

**End tokens** are also those that tokenizer files name: the `eos_token`, and what chat templates end turns
with. A fine-tune often has neither in config.json: its base model's end of text stands there, while it was
trained to end its turns with `<|im_end|>`, and it would go on with invented turns. A turn's end is known by
its name: a special token, called an end of turn (of message, of text), that a chat template spells out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from eyas.common.errors import ConfigError
from eyas.common.model_folder import TextSource, given_template, read_json_object
from eyas.common.tokenizers.source import special_tokens, tokenizer_file
from eyas.engine.checkpoint.modelopt import BESIDE
from eyas.engine.checkpoint.packed import packed_among
from eyas.engine.checkpoint.quantized import QUANTIZED, QuantizedConfig
from eyas.engine.checkpoint.values import said, section, whole_number, wholes

PICKLED = "pytorch_model*.bin"
"""Weights of an older export: official EAGLE heads come so."""
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 4096
_LONGEST_NAME = 255  # bytes
_MOST_TEXT = 65536  # bytes of a tensor that says something about others
_OF = "turn|text|message|msg|sentence|assistant|utterance|response"
_END = re.compile(
    rf"im_end|eo[tms](_id)?|end|turn_end|message_end|msg_end|assistant_end|end_?(of_?)?({_OF})(_token)?"
)
_TEKKEN_EOS = "</s>"
_TURN_BACK = "<turn|>"  # Gemma 4: its other end of a turn has the bar in front
_MESSAGE_END, _ANSWER_END = "<|end|>", "<|return|>"  # Harmony: an answer has several messages


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict; ConfigError if the folder or the file is missing or is not JSON.

    If it says nothing of quantized weights, what hf_quant_config.json says is its `quantization_config`.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json")
    raw = read_json_object(folder / "config.json")
    beside = folder / BESIDE
    if beside.is_file() and not any(raw.get(name) for name in QUANTIZED):
        raw["quantization_config"] = {**read_json_object(beside), "quant_method": "modelopt"}
    return raw


def end_tokens(
    folder: Path, raw: Mapping[str, Any], vocab_size: int, texts: TextSource | None = None
) -> tuple[int, ...]:
    """The ids that end an answer: those of generation_config.json, of config.json (of its `text_config` where
    it names none), and those that its tokenizer's files name (`turn_ends`): fine-tunes often leave out one or
    two of these. `texts`: where those files are (None: in the same folder).

    Raises ConfigError, which names the file and the value, for one in either that is no id below
    `vocab_size`.
    """
    said = raw if raw.get("eos_token_id") is not None else section(raw, "text_config")
    ids = _ids_of(folder / "config.json", said, vocab_size)
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = (*_ids_of(generation, read_json_object(generation), vocab_size), *ids)
    return tuple(dict.fromkeys((*ids, *named_ends(texts or TextSource(folder), vocab_size))))


def _ids_of(path: Path, raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    listed = value if isinstance(value, list) else [value] * (value is not None)
    try:
        ids = [whole_number("eos_token_id", each, most=vocab_size - 1) for each in listed]
    except ValueError as error:
        raise ConfigError(f"{path}: {error} (an id of the {vocab_size} in the vocabulary)") from None
    return tuple(dict.fromkeys(ids))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, in name order; of a folder that has none, those made of its pytorch_model*.bin.

    Raises ConfigError if there is neither or the index names a missing one.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = read_json_object(index).get("weight_map")
        if not isinstance(named, dict):
            raise ConfigError(f"{index} has no weight_map")
        files = sorted({folder / _inside(index, tensor, name) for tensor, name in named.items()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            raise ConfigError(f"weight file {file} is named by the index but does not exist")
    return files or _converted(folder)


def _inside(index: Path, tensor: str, name: Any) -> str:
    """The name of a file in the folder. Raises ConfigError for what is none, or leads out of the folder."""
    if isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME:
        path = PurePosixPath(name)
        if not path.is_absolute() and ".." not in path.parts:
            return name
    why = f"weight_map has {said(name)} for {said(tensor)}, which is no name of a file in the folder"
    raise ConfigError(f"{index}: {why}")


def has_weights(folder: Path) -> bool:
    """True if there are files that `weight_files` takes."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", PICKLED))


def _converted(folder: Path) -> list[Path]:
    pickled = sorted(folder.glob(PICKLED))
    if not pickled:
        raise ConfigError(f"model folder {folder} has no .safetensors files")
    from eyas.engine.checkpoint.pickled import converted  # brings torch, which few callers need

    # Samples of the bytes alone do not tell every change of a file.
    return [converted(path, fingerprint({"changed": path.stat().st_mtime_ns}, [path])) for path in pickled]


def tensor_shapes(folder: Path, quantized: QuantizedConfig | None) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, from the files' headers alone."""
    return {name: shape for name, (_, shape) in stored_tensors(folder, quantized).items()}


def stored_tensors(folder: Path, quantized: QuantizedConfig | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor's dtype, as safetensors files call it, and shape, from their headers alone.

    A packed matrix is one tensor, whose dtype is "".
    """
    headers = {path: _header(path) for path in weight_files(folder)}
    tensors = {
        name: (str(entry.get("dtype")), tuple(entry["shape"]))
        for header in headers.values()
        for name, entry in header.items()
    }
    shapes = {name: shape for name, (_, shape) in tensors.items()}

    def text(name: str) -> bytes:
        path = next(path for path, header in headers.items() if name in header)
        return _bytes(path, headers[path][name])

    for matrix in packed_among(quantized, shapes):
        for part in matrix.stored.values():
            del tensors[part]
        tensors[matrix.name] = "", matrix.shape(shapes, text)
    return tensors


def check_whole(folder: Path) -> None:
    """Raises ConfigError for a safetensors file that is missing, is none, or is cut off; reads headers."""
    if any(folder.glob("*.safetensors")):
        for path in weight_files(folder):
            _header(path)


def _header(path: Path) -> dict[str, Any]:
    """Reads the description of a safetensors file's tensors, by name: 8 bytes of length, then JSON."""
    file_size = path.stat().st_size
    try:
        opened = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    with opened as file:
        length = file.read(8)
        if length == b"version ":
            raise ConfigError(f"{path} is a pointer of Git LFS, not the weights: `git lfs pull` brings them")
        size = int.from_bytes(length, "little")
        try:
            header = json.loads(file.read(size) if size < file_size else b"")
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for entry in entries.values():
                wholes(entry, "shape")
            whole = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{path} is not a safetensors file") from None
    if file_size < whole:
        raise ConfigError(f"{path} is cut off: {file_size} of {whole} bytes are there")
    return entries


def _bytes(path: Path, entry: Mapping[str, Any]) -> bytes:
    """The bytes of a small tensor, of which a header has the entry."""
    first, last = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little") + first)
        return file.read(min(last - first, _MOST_TEXT))


def fingerprint(meaning: Mapping[str, Any], files: list[Path]) -> str:
    """Hex digest of a configuration and of evenly spaced samples of every file, not of where they lie."""
    digest = hashlib.sha256()
    digest.update(json.dumps(meaning, sort_keys=True).encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES_PER_FILE):
                file.seek(size * i // _SAMPLES_PER_FILE)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def named_ends(source: TextSource, vocab_size: int) -> tuple[int, ...]:
    """Ids below `vocab_size`. Files that are missing or say nothing of the kind name no end; the gateway
    refuses those that cannot be read. Raises ConfigError for a given template that cannot be.
    """
    folder = source.folder
    settings = _settings(folder / "tokenizer_config.json")
    added = _added_tokens(folder, settings)
    texts = _templates(folder, settings) if source.template is None else given_template(source.template)[0]
    older = _settings(folder / "special_tokens_map.json")
    eos = _content(settings.get("eos_token")) or _content(older.get("eos_token")) or _usual_eos(folder)
    ends = [id for name, id in added.items() if name == eos or _ends_turns(name, texts, added)]
    return tuple(id for id in ends if 0 <= id < vocab_size)


def _ends_turns(token: str, templates: str, added: dict[str, int]) -> bool:
    if token not in templates or (token == _MESSAGE_END and _ANSWER_END in added):
        return False
    words = re.sub(r"[^a-z]+", "_", token.lower()).strip("_")
    return token == _TURN_BACK or bool(_END.fullmatch(words))


def _added_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    """The special tokens by their text, whichever form the tokenizer has."""
    tokens: dict[str, int] = {}
    decoder = settings.get("added_tokens_decoder")
    for id, token in decoder.items() if isinstance(decoder, dict) else ():
        name = _content(token)
        if name is not None and id.isdecimal() and len(id) < 10:
            tokens[name] = int(id)
    return tokens | special_tokens(folder)


def _usual_eos(folder: Path) -> str | None:
    """The end token of a tekken.json, beside which no file names one."""
    path = tokenizer_file(folder)
    return _TEKKEN_EOS if path is not None and path.name == "tekken.json" else None


def _templates(folder: Path, settings: dict[str, Any]) -> str:
    """The text of all chat templates."""
    texts = [json.dumps(settings.get("chat_template", ""), ensure_ascii=False)]
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if path.is_file():
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    texts.append(json.dumps(_settings(folder / "chat_template.json"), ensure_ascii=False))
    return "\n".join(texts)


def _content(token: Any) -> str | None:
    """The text of a token that is written as a text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _settings(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path) if path.is_file() else {}
    except ConfigError:
        return {}
