"""ModelOpt: NVFP4, and FP8 with scales that are stored for weights and for rows.

Stated in config.json's `quantization_config`, or beside config.json in hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eyas.engine.checkpoint.fp4 import OF_16, ModelOptNvfp4
from eyas.engine.checkpoint.packed import group_of
from eyas.engine.checkpoint.quantized import Fp8Config, QuantizedConfig, Raw, ignored_modules, refused
from eyas.engine.checkpoint.values import said, section

BESIDE = "hf_quant_config.json"
"""The file that states it for a folder whose config.json says nothing."""


def read_modelopt(raw: Raw) -> QuantizedConfig | None:
    """Reads `quant_method` modelopt; None: the KV cache alone is quantized, which is passed over."""
    raw = section(raw, "quantization") or raw
    algorithm = raw.get("quant_algo")
    if algorithm is None:
        return None
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise refused(f"modelopt with quant_algo {said(algorithm)}")
    return _ALGORITHMS[algorithm](raw)


def _nvfp4(raw: Raw) -> ModelOptNvfp4:
    if raw.get("group_size") is not None and (size := group_of(raw, "modelopt")) != OF_16:
        raise refused(f"modelopt's NVFP4 with group_size {size}")
    return ModelOptNvfp4(4, OF_16, ignored=ignored_modules(raw))


def _fp8(raw: Raw) -> Fp8Config:
    return Fp8Config("tensor", rows="tensor", ignored=ignored_modules(raw))


def _fp8_by_channel(raw: Raw) -> Fp8Config:
    return Fp8Config("channel", rows="token", ignored=ignored_modules(raw))


_ALGORITHMS: dict[str, Callable[[Any], QuantizedConfig]] = {
    "NVFP4": _nvfp4,
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_by_channel,
}
