"""`local`: the peer's area lives in this process (two engines on threads of it)."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass

from eyas.common.errors import ConfigError
from eyas.common.pool import Export
from kv_transfer.area import Area
from kv_transfer.backends.base import Copy, Site, Source, copy_pages
from kv_transfer.backends.blocking import BlockingBackend


@dataclass(frozen=True)
class Neighbour(Source):
    """A peer whose area this process can reach."""

    area: Area


class LocalBackend(BlockingBackend):
    """Copies between the areas of all who were made with the same `areas`, which only they change."""

    name = "local"

    def __init__(self, site: Site, areas: MutableMapping[bytes, Area]) -> None:
        super().__init__(site.area)
        self._in_reach = not site.devices
        self._areas = areas
        self._key = secrets.token_bytes(8)

    def export(self, rank: int = 0) -> Export | None:
        if not self._in_reach:
            return None
        self._areas[self._key] = self.area
        return {"key": self._key}

    def open(self, export: Export) -> Source:
        area = self._areas.get(export.get("key", b""))
        if area is None:
            raise ConfigError("the peer's KV pool is not in this process")
        return Neighbour(area)

    def copy(self, source: Source, job: Copy) -> int:
        assert isinstance(source, Neighbour)
        return copy_pages(job, source.area.pages, self.area.pages)

    def close(self, deadline: float) -> bool:
        """No peer finds its area any more."""
        self._areas.pop(self._key, None)
        return super().close(deadline)
