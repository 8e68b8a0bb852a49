"""Which class runs an architecture: a dict of lazy imports.

It knows names only, so that a configuration can be judged without loading torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_LLAMA = "eyas.engine.models.llama:Llama"

MODELS = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}


def model_class(architecture: str) -> Any:
    """The model class of an architecture that `MODELS` lists (ModelConfig has checked that it does)."""
    module, name = MODELS[architecture].split(":")
    return getattr(importlib.import_module(module), name)
