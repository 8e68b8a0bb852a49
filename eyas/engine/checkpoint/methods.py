"""Reads from a config.json how its weights are quantized, with the reader of each `quant_method`.

A format has a file of its own; this one knows their names. What is not here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eyas.engine.checkpoint.awq import read_awq
from eyas.engine.checkpoint.bitsandbytes import read_bitsandbytes
from eyas.engine.checkpoint.compressed import read_compressed
from eyas.engine.checkpoint.fp4 import read_mxfp4
from eyas.engine.checkpoint.gptq import read_auto_round, read_gptq
from eyas.engine.checkpoint.modelopt import read_modelopt
from eyas.engine.checkpoint.quantized import (
    QUANTIZED,
    QuantizedConfig,
    Raw,
    read_fbgemm,
    read_fp8,
    refused,
)
from eyas.engine.checkpoint.values import said

METHODS: dict[str, Callable[[Raw], QuantizedConfig | None]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "fbgemm_fp8": read_fbgemm,
    "bitsandbytes": read_bitsandbytes,
}
"""By `quant_method`: what reads the rest."""


def read_quantized(raw: Raw) -> QuantizedConfig | None:
    """Reads how weights are stored; None: in 16 or 32 bits. Scales of an FP8 KV cache are passed
    over: keys and values that are in FP8 here have scales of their own.

    Raises ConfigError, which names the kind, for weights that are stored in any other way.
    """
    quantization = next((quantization for name in QUANTIZED if (quantization := raw.get(name))), None)
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise refused(said(quantization))
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise refused(f"quant_method {said(method)}")
    return METHODS[method](quantization)
