"""A run's state on disk: written whole or not at all, and refused by a run of other settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.saved import load_saved


@dataclass(frozen=True)
class TrainingCheckpoint:
    """One file. `settings`: plain values that a run must share with the one it continues, by flag."""

    path: Path
    settings: Mapping[str, Any]

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        torch.save({"settings": dict(self.settings), **state}, new)
        os.replace(new, self.path)

    def load(self, device: str) -> dict[str, Any]:
        """The state, on a device. Raises ConfigError for a file that is missing, broken or of another run."""
        try:
            state: Any = load_saved(self.path, device)
        except FileNotFoundError:
            raise ConfigError(f"--resume: there is no {self.path}", param="resume") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--resume: {self.path} cannot be read: {error}", param="resume") from error
        if not isinstance(state, dict) or "settings" not in state:
            raise ConfigError(f"--resume: {self.path} is no checkpoint of a run", param="resume")
        theirs = state.pop("settings")
        for flag, value in self.settings.items():
            if theirs.get(flag) != value:
                text = f"--{flag}: {value} here, and {theirs.get(flag)} in the run that {self.path} is of"
                raise ConfigError(text, param=flag)
        return state
