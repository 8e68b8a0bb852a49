"""Builds a model of transformers with its weights: those of a folder, or noise. Nothing is fetched.

Files are opened here, names and shapes are matched by transformers, which knows its older spellings. What
it leaves out or makes up is an error.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.folder import weight_files
from eyas.engine.checkpoint.weights import PLAIN, FiniteCheck, WeightPlacement, check_meaning
from eyas.engine.models.foreign.classes import model_class
from eyas.engine.models.foreign.seams import PAGED, attends_by, register

_LAYER = re.compile(r"\.(\d+)\.")


def load(target: ModelConfig, placement: WeightPlacement) -> Any:
    """The model on its device, ready to attend by `seams.PAGED`. Raises ConfigError if it is not whole."""
    from transformers.utils import logging

    assert target.foreign is not None
    register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config, architecture = model_class(json.loads(target.foreign.stated), target.folder)
    attends_by(config, PAGED)
    if placement.device == "cpu":
        config._experts_implementation = "eager"  # which takes a row's experts one by one
    if target.load_format == "dummy":
        return _noise(config, architecture, placement)
    with contextlib.ExitStack() as files:
        stored = _stored(target.folder, files)
        try:
            model, report = architecture.from_pretrained(
                None,
                config=config,
                state_dict=stored,
                dtype=placement.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
        except (RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"the weights of {target.folder} are not this model's: {text}") from error
        _check_whole(target, report)
        own = dict(model.named_parameters())
        for name, tensor in stored.items():
            if name in own or name.endswith(".weight"):  # others may be masks that older code stored
                check_meaning(name, tensor, PLAIN)
        model = model.to(placement.device).eval()
    check = FiniteCheck()
    for name, parameter in model.named_parameters():
        check.see(name, parameter.detach())
    if broken := check.broken():
        raise ConfigError(f"tensor {broken[0]} of {target.folder} holds NaN or infinity")
    return model


def _stored(folder: Path, files: contextlib.ExitStack) -> dict[str, Any]:
    """The tensors of the files by name, not read yet."""
    stored: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None
        for name in file.keys():
            if name in stored:
                raise ConfigError(f"tensor {name} of {path} is in another file of the folder as well")
            stored[name] = file.get_slice(name)
    return stored


def _check_whole(target: ModelConfig, report: dict[str, Any]) -> None:
    """Raises ConfigError for tensors that are missing, of another shape, or that nothing reads."""
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"{target.folder} has no tensor {missing[0]}")
    if other := sorted(report["mismatched_keys"]):
        raise ConfigError(f"tensor {other[0][0]} of {target.folder} has another shape than its config says")
    if left := sorted(name for name in report["unexpected_keys"] if _is_own(name, target.num_layers)):
        raise ConfigError(f"tensor {left[0]} of {target.folder} is none that {target.architecture} reads")


def _is_own(name: str, layers: int) -> bool:
    """Whether a tensor is no draft head's, which stands behind the last layer."""
    return all(int(number) < layers for number in _LAYER.findall(name))


def _noise(config: Any, architecture: Any, placement: WeightPlacement) -> Any:
    """Seeded: as transformers begins a training."""
    own = [placement.device] if placement.device != "cpu" else []
    with torch.random.fork_rng(own), torch.device(placement.device):
        torch.manual_seed(0)
        model = architecture._from_config(config, dtype=placement.dtype, attn_implementation=PAGED)
    return model.eval()
