"""Files that `torch.save` has written: tensors and plain objects, and whole models of an older export.

Only tensors and plain objects are unpickled: a file that holds anything else, and so might run code, is
refused. Weights of an older export (`pytorch_model*.bin`, as official EAGLE heads have them) are converted to
safetensors once, into the user's cache, and found there from then on.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyas.common.errors import ConfigError
from eyas.common.machine.folders import cache_home

log = logging.getLogger("eyas.engine")


def converted(path: Path, digest: str) -> Path:
    """The safetensors file with the tensors of `path`, whose state `digest` names.

    Raises ConfigError if `path` is no file of tensors, or if the cache cannot be written.
    """
    target = cache_home() / "weights" / digest / f"{path.stem}.safetensors"
    if not target.exists():
        log.info("%s is converted to %s, once", path, target)
        own = target.with_suffix(f".{secrets.token_hex(8)}")  # several workers may do this at the same time
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(_tensors(path), own)
            own.rename(target)
        except OSError as error:
            raise ConfigError(f"{path} cannot be converted: {error}") from None
    return target


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Loads tensors by name; each has memory of its own, as safetensors demand.

    PyTorch before 1.6 wrote no archives.
    """
    try:
        tensors = load_saved(path, mapped=zipfile.is_zipfile(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a PyTorch file of tensors: {error}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(value, torch.Tensor) for value in tensors.values()
    ):
        raise ConfigError(f"{path} does not hold tensors by name")
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}


def load_saved(path: Path, device: str = "cpu", *, mapped: bool = False) -> object:
    """Loads the object in the file. `mapped`: its tensors stay on the disk until they are read.

    Raises OSError, and ValueError, in one line, for a damaged file or one of other objects.
    """
    try:
        return torch.load(path, map_location=device, mmap=mapped, weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError:  # its text says how to run the code
        raise ValueError(
            "it is damaged, or holds other objects than tensors, numbers, text and lists"
        ) from None
    except Exception as error:  # a damaged pickle raises whatever its instructions come upon
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from None
