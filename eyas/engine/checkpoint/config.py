"""What a Hugging Face folder says about a model, read once and frozen.

It knows config.json and the headers of safetensors files; it refuses to know torch, so the fronts may
read a configuration too. Anything that cannot work is one `ConfigError`, here and not mid-load.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.architectures import MODELS

DEFAULT_ROPE_THETA = 10000.0
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: `kind` is default, linear or llama3 (the last four fields are llama3's)."""

    theta: float = DEFAULT_ROPE_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Rope:
        """Reads `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta` (older)."""
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        theta = scaling.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return cls(theta=float(theta))
        if kind == "linear":
            return cls(theta=float(theta), kind=kind, factor=float(scaling["factor"]))
        if kind == "llama3":
            return cls(
                theta=float(theta),
                kind=kind,
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_context=int(scaling["original_max_position_embeddings"]),
            )
        raise ConfigError(f"rope type {kind!r} is not supported (default, linear and llama3 are)")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama family. `context_length` is in tokens; sizes are element counts.

    `window`: how many tokens a row attends to (0: all), which must be the whole context that is served.
    """

    folder: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    context_length: int
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    window: int = 0
    load_format: str = "auto"  # "dummy": weight files are neither needed nor read

    @classmethod
    def from_folder(cls, folder: Path | str, load_format: str = "auto") -> ModelConfig:
        """Raises ConfigError if the folder cannot be served, in one sentence that says why."""
        folder = Path(folder)
        raw = read_config(folder)
        architecture = next(iter(raw.get("architectures") or ["(none named)"]))
        if architecture not in MODELS:
            known = ", ".join(sorted(MODELS))
            raise ConfigError(f"architecture {architecture} of {folder} is not supported ({known} are)")
        if load_format != "dummy":
            weight_files(folder)
        eos = raw.get("eos_token_id")
        generation = folder / "generation_config.json"
        if generation.is_file():
            named = _read_json(generation).get("eos_token_id")
            eos = eos if named is None else named
        config = cls.from_json(folder, architecture, raw)
        return dataclasses.replace(config, eos_token_ids=_ids(eos), load_format=load_format)

    @classmethod
    def from_json(cls, folder: Path, architecture: str, raw: Mapping[str, Any]) -> ModelConfig:
        """The sizes in a config.json of Llama's keys; a missing or unusable one is a ConfigError."""
        try:
            config = cls(
                folder=folder,
                architecture=architecture,
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=int(raw["num_attention_heads"]),
                num_kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
                head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
                norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope=Rope.from_json(raw),
                context_length=int(raw.get("max_position_embeddings", 2048)),
                tied_head=bool(raw.get("tie_word_embeddings", False)),
                qkv_bias=bool(raw.get("attention_bias", architecture == "Qwen2ForCausalLM")),
                output_bias=bool(raw.get("attention_bias", False)) and architecture != "Qwen2ForCausalLM",
                qk_norm=architecture == "Qwen3ForCausalLM",
                window=int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window", True) else 0,
            )
        except KeyError as missing:
            raise ConfigError(f"config.json of {folder} has no {missing.args[0]}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config.json of {folder} holds a value of the wrong kind: {error}") from None
        config._check(raw)
        return config

    def limited_to(self, context_length: int | None) -> ModelConfig:
        """The model for sequences of at most `context_length` tokens (None: its own limit).

        Raises ConfigError if that is more than its own: positions that it was never trained on; or more than
        its sliding window: attention that is not implemented.
        """
        context_length = self.context_length if context_length is None else context_length
        if 0 < self.window < context_length:
            raise ConfigError(
                f"config.json of {self.folder}: a sliding_window of {self.window} tokens is not supported "
                f"for a context of {context_length} (--context-length {self.window} needs no window)"
            )
        if context_length > self.context_length:
            asked = f"--context-length: {context_length} is more than the {self.context_length} tokens"
            raise ConfigError(f"{asked} of {self.folder}", param="context-length")
        return dataclasses.replace(self, context_length=context_length)

    def _check(self, raw: Mapping[str, Any]) -> None:
        rules = [
            (self.num_heads % self.num_kv_heads == 0, "num_key_value_heads must divide num_attention_heads"),
            (self.head_dim % 2 == 0, f"head_dim {self.head_dim} must be even"),
            (
                raw.get("hidden_act", "silu") == "silu",
                f"hidden_act {raw.get('hidden_act')!r} is not supported",
            ),
            (not raw.get("mlp_bias"), "mlp_bias is not supported"),
            (not raw.get("quantization_config"), "quantized weights are not supported"),
        ]
        for holds, complaint in rules:
            if not holds:
                raise ConfigError(f"config.json of {self.folder}: {complaint}")

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest that differs between models that could produce different KV (a sample of the bytes)."""
        return _fingerprint(self.folder, self)


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A draft head for a given target. `decoder` holds its own layer's sizes and its own RoPE.

    `capture_layers`: the residual stream *entering* these target layers makes the feature.
    """

    folder: Path
    algorithm: str
    decoder: ModelConfig
    draft_vocab_size: int
    capture_layers: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path | str, target: ModelConfig, load_format: str = "auto") -> DraftConfig:
        """Recognises a head by its tensors. Raises ConfigError if it does not fit `target`.

        A "dummy" one has no tensors yet: it is an EAGLE-3 head of the sizes in its config.json.
        """
        folder, dummy = Path(folder), load_format == "dummy"
        raw = read_config(folder)
        stored = {} if dummy else tensor_shapes(folder)
        shapes = {strip_prefix(name): shape for name, shape in stored.items()}
        decoder = ModelConfig.from_json(folder, "eagle3", raw)
        # Some heads state their target's depth; and rows go as far as the target's, whatever the head saw.
        context = max(decoder.context_length, target.context_length)
        decoder = dataclasses.replace(decoder, num_layers=1, context_length=context, load_format=load_format)
        captured = _capture_layers(raw, target.num_layers)
        rules = [
            (dummy or _is_eagle3(shapes, decoder.hidden_size, len(captured)), "it is not an EAGLE-3 head"),
            (not raw.get("norm_before_residual"), "norm_before_residual is not supported"),
            (decoder.hidden_size == target.hidden_size, "its hidden_size is not the target's"),
            (decoder.vocab_size == target.vocab_size, "its vocab_size is not the target's"),
            (not 0 < decoder.window < context, "its sliding_window is shorter than the context"),
            (all(0 <= i <= target.num_layers for i in captured), f"the target has no layers {captured}"),
        ]
        for holds, complaint in rules:
            if not holds:
                raise ConfigError(f"draft head {folder}: {complaint}")
        outputs = raw.get("draft_vocab_size") if dummy else shapes.get("lm_head.weight", (None,))[0]
        return cls(
            folder=folder,
            algorithm="eagle3",
            decoder=decoder,
            draft_vocab_size=int(outputs or target.vocab_size),
            capture_layers=captured,
        )

    @property
    def dummy_tensors(self) -> frozenset[str]:
        """Of the tensors that only some heads have, those that a dummy head of these sizes needs."""
        shares_outputs = self.draft_vocab_size == self.decoder.vocab_size
        return frozenset() if shares_outputs else frozenset({"lm_head.weight", "d2t"})

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the head; compared between the workers that share draft KV or features."""
        return _fingerprint(self.folder, self)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict; ConfigError if the folder or the file is missing or is not JSON."""
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json")
    return _read_json(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, in name order; ConfigError if there is none or the index names a missing one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in _read_json(index)["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {folder} has no .safetensors files")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"weight file {file} is named by the index but does not exist")
    return files


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every stored tensor's shape, from the files' headers alone (8 bytes of length, then JSON)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(size) if size < path.stat().st_size else b"")
            except ValueError:
                raise ConfigError(f"{path} is not a safetensors file") from None
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def strip_prefix(name: str) -> str:
    """A head's tensor name in the official spelling: no `model.` prefix, `midlayer.` for layer 0."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _is_eagle3(shapes: Mapping[str, tuple[int, ...]], hidden: int, captured: int) -> bool:
    queries = shapes.get("midlayer.self_attn.q_proj.weight", (0, 0))
    return shapes.get("fc.weight") == (hidden, captured * hidden) and queries[1] == 2 * hidden


def _capture_layers(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Without a field the paper's three; the field names layers whose *output* is captured, hence + 1."""
    ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(i) + 1 for i in ids) if ids else (2, layers // 2, layers - 3)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return parsed


def _fingerprint(folder: Path, config: ModelConfig | DraftConfig) -> str:
    """Hashes the meaning of the config (not where it lies) and evenly spaced samples of every weight file.

    How long a context is served, and a window that is no shorter, change no key and no value. Dummy weights
    follow from the config, which says that they are dummies.
    """
    digest = hashlib.sha256()
    fields = dataclasses.asdict(config)
    decoder = fields.get("decoder", fields)
    for unread in ("folder", "context_length", "window"):
        decoder.pop(unread)
    fields.pop("folder", None)
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for path in [] if decoder["load_format"] == "dummy" else weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES_PER_FILE):
                file.seek(size * i // _SAMPLES_PER_FILE)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
