"""The RDMA cards of this host, and which of them lie near a GPU: read from sysfs, nothing is opened.

A card is its first port: the library that uses them takes no other. Source:
Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import ConfigError

SYSFS = Path("/sys")
ACTIVE = "4:"  # of a port's state
UNFIT_DRIVERS = {"efa": "it cannot read a GPU's pool, whose memory is mapped"}

_log = logging.getLogger("eyas.pulls")


@dataclass(frozen=True)
class RdmaCard:
    """A network card, and the rate of its link; 0: that is not told."""

    name: str
    bytes_per_s: float


def folders(sysfs: Path = SYSFS) -> list[Path]:
    """The folders of the cards, by name."""
    return sorted((sysfs / "class/infiniband").glob("*"))


def near(gpu: str, sysfs: Path = SYSFS) -> list[RdmaCard]:
    """The cards that are up and share most of their way on the PCIe tree with the GPU at the address `gpu`.

    Where none shares any, those of its memory's node; where that is not known, all.
    """
    place, folder = sysfs / "bus/pci/devices" / gpu.lower(), sysfs / "class/infiniband"
    ways = {card: _nearness(place, folder / card.name / "device") for card, why in _all(sysfs) if not why}
    best = max(ways.values(), default=(0, False))
    return [card for card, nearness in ways.items() if nearness == best]


def named(names: Sequence[str], sysfs: Path = SYSFS) -> list[RdmaCard]:
    """The cards with these names that are up; those that are not are logged.

    Raises ConfigError for a name that this host does not have.
    """
    there = {card.name: (card, why) for card, why in _all(sysfs)}
    cards = []
    for name in names:
        if name not in there:
            has = ", ".join(there) or "none"
            raise ConfigError(
                f"{name} is no RDMA card of this host, which has {has}", param="transfer-devices"
            )
        card, why = there[name]
        if why:
            _log.warning("the RDMA card %s is not used: %s", name, why)
        else:
            cards.append(card)
    return cards


def any_up(sysfs: Path = SYSFS) -> bool:
    """Whether some card's port is active, also that of one which cannot read a GPU's pool."""
    return any(_text(path / "ports/1/state").startswith(ACTIVE) for path in folders(sysfs))


def _all(sysfs: Path) -> list[tuple[RdmaCard, str]]:
    """All cards, by name, and why each cannot be used; empty: it can."""
    cards = []
    for path in folders(sysfs):
        port, driver = path / "ports/1", (path / "device/driver").resolve().name
        state = _text(port / "state")
        why = "" if state.startswith(ACTIVE) else f"the state of its port is {state or 'unknown'}"
        cards.append((RdmaCard(path.name, _rate(_text(port / "rate"))), UNFIT_DRIVERS.get(driver, why)))
    return cards


def _nearness(gpu: Path, card: Path) -> tuple[int, bool]:
    """How many bridges of the PCIe tree both lie behind, and whether they are of one node of memory."""
    common = os.path.commonprefix([path.resolve().parts for path in (gpu, card)])
    nodes = [_text(path / "numa_node") for path in (gpu, card)]
    return sum(":" in part for part in common), nodes[0] == nodes[1] not in ("", "-1")


def _rate(text: str) -> float:
    """Bytes per second of "400 Gb/sec (4X NDR)"; 0 for anything else."""
    number, _, unit = text.partition(" ")
    try:
        return float(number) * 1e9 / 8 if unit.startswith("Gb/sec") else 0.0
    except ValueError:
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
