"""Loads tensors and plain objects that `torch.save` has written; a pickle that would run code is not
loaded."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch


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
