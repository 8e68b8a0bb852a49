"""Chooses the teacher of a target: the plain decoder on a CPU, the fast one on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from eyas.train.plain_teacher import PlainTeacher
from eyas.train.teacher import BatchLimit, TeacherModel


def load_teacher(folder: Path, device: str, room: BatchLimit) -> TeacherModel:
    """The target of a folder. Raises ConfigError if it cannot be served there."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device: {device} is not available: PyTorch sees no GPU here", param="device")
    config = read_model(folder)
    if room.length > config.context_length:
        raise ConfigError(
            f"--max-length: {room.length} is more than the {config.context_length} tokens of {folder}",
            param="max-length",
        )
    placement = WeightPlacement(device, torch.float32 if device == "cpu" else torch.bfloat16)
    if device == "cpu":
        return PlainTeacher(config, placement, room)
    if why := refusal(config, config.vocab_size):
        raise ConfigError(f"--target: {folder} has no implementation for a GPU: {why}", param="target")
    from eyas.train.device_teacher import DeviceTeacher

    torch.cuda.set_device(number_of(device))  # of this thread: kernels run on the current device
    return DeviceTeacher(config, placement, room)
