"""The GPUs of this machine, as the driver's tool nvidia-smi tells: without torch, before anything is loaded.

GPUs are numbered as in "cuda:1", among those that CUDA_VISIBLE_DEVICES shows. (Among GPUs of different kinds,
CUDA has the driver's order if CUDA_DEVICE_ORDER is PCI_BUS_ID.)
"""

from __future__ import annotations

import os
import subprocess

from eyas.common.errors import ConfigError

TIMEOUT_S = 30.0  # a driver that nothing keeps awake takes seconds to start
SLICE = "MIG-"  # how the names of parts of GPUs begin, which this query does not list


def memory() -> tuple[int | None, ...]:
    """Bytes of each GPU, by number; None for one whose size is not told.

    Raises ConfigError if there is none, or the driver does not answer.
    """
    sizes = _visible("memory.total")
    if not sizes:
        raise _none("CUDA_VISIBLE_DEVICES shows none")
    return tuple(int(mib) << 20 if mib.isdigit() else None for mib in sizes)


def visible() -> int:
    """How many GPUs there are; 0 if the driver tells of none, or does not answer."""
    try:
        return len(_visible("index"))
    except ConfigError:
        return 0


def capability(device: str) -> int:
    """The compute capability of "cuda" or "cuda:1", 90 for instance.

    Raises ConfigError if there is no such GPU, or the driver does not tell.
    """
    number, versions = number_of(device), _visible("compute_cap")
    if number >= len(versions) or not (version := versions[number].replace(".", "")).isdigit():
        raise ConfigError(f"--device: the driver does not tell what {device} can do", param="device")
    return int(version)


def model(device: str) -> str:
    """Returns the model of "cuda" or "cuda:1", "NVIDIA H200" for instance; "" if the driver has none."""
    try:
        names = _visible("name")
    except ConfigError:
        return ""
    return names[number_of(device)] if number_of(device) < len(names) else ""


def number_of(device: str) -> int:
    """1 for "cuda:1", 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)


def _visible(field: str) -> list[str]:
    """Returns `field` of nvidia-smi for every visible GPU; "" for a part of a GPU."""
    lines = _ask(f"index,uuid,{field}").splitlines()
    rows = [tuple(words) for line in lines if len(words := line.split(", ")) == 3]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return [value for _, _, value in rows]
    values: list[str] = []
    for name in map(str.strip, shown.split(",")):
        matches = [value for index, uuid, value in rows if name and (index == name or uuid.startswith(name))]
        if not matches and not name.startswith(SLICE):
            break  # as CUDA does: a name that means no GPU ends the list
        values += matches[:1] or [""]
    return values


def _ask(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except OSError:
        raise _none("nvidia-smi, which comes with its driver, cannot be run") from None
    except subprocess.TimeoutExpired:
        raise _none(f"nvidia-smi did not answer within {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().partition("\n")[0]
        raise _none(f"nvidia-smi ended with code {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def _none(why: str) -> ConfigError:
    return ConfigError(f"--device: there is no GPU here: {why}", param="device")
