"""Copies of a model's own ends that PEFT writes beside an adapter of its output head, or when asked to.

What is served is the model's own: a copy has to be that. Its file may have many times the adapter's bytes, so
a copy is read by parts, and only to be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eyas.common.errors import InvalidRequest
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.host_tensors import DTYPES
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.ipc.adapter_messages import LORA_PATH

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COPY = re.compile(r"base_model\.model\.(?P<module>.+?)(\.base_layer)?\.weight")
_ROWS = 8192  # compared at a time


def copied(name: str, spelling: Callable[[str], str]) -> str:
    """The name by which a model asks for the tensor of which this may be a copy; "": of none of its ends."""
    match = _COPY.fullmatch(name)
    own = spelling(f"{match['module']}.weight") if match is not None else ""
    return own if own in (HEAD, EMBEDDING) else ""


def check_copies(
    file: Path, names: Iterable[str], model: ModelConfig, spelling: Callable[[str], str]
) -> None:
    """Raises InvalidRequest for a tensor of an adapter's file that is not the model's own, rounded to the
    copy's type. Of dummy weights none can be compared.
    """
    if model.load_format == "dummy":
        return
    for name in names:
        with safe_open(file, framework="pt") as stored:
            copy = stored.get_slice(name)
            placement = WeightPlacement(dtype=DTYPES[copy.get_dtype()])
            sizes = (model.folder, model.spelling, placement, ("",), model.quantized, model.fused)
            with FolderWeights(*sizes) as weights:
                kind = EMBEDDING if model.tied_head else copied(name, spelling)
                own = weights.take(kind, (model.vocab_size, model.hidden_size))
            if not _same(copy, own):
                text = f"{name} is no copy of the model's own: whole modules are not supported"
                raise InvalidRequest(f"{text} (PEFT: save_embedding_layers=False)", param=LORA_PATH)


def _same(copy: Any, own: torch.Tensor) -> bool:
    if tuple(copy.get_shape()) != tuple(own.shape):
        return False
    firsts = range(0, len(own), _ROWS)
    return all(torch.equal(copy[first : first + _ROWS], own[first : first + _ROWS]) for first in firsts)
