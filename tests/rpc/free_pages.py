"""A prompt of nine pages, and a check that nothing writes to a worker's free pages."""

from __future__ import annotations

from typing import Any

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest

PROMPT = tuple(range(3, 133))  # 9 pages
PAGE_BYTES = 4 * 2 * 16 * 2 * 16 * 4


def request(id: str = "r", prompt: tuple[int, ...] = PROMPT) -> GenerationRequest:
    return GenerationRequest(id, prompt, SamplingParams(temperature=0.8, seed=5, max_tokens=12))


class Poison:
    """Every free page of a worker's pool is full of one number; a write to a free page is found."""

    VALUE = -777.0

    def __init__(self, worker: Any) -> None:
        self._pages = worker.engine._parts.scheduler.pool
        self._tensor = worker.engine._parts.pools[0].tensor
        self.freed = 0
        self._tensor[self._free()] = self.VALUE
        self._take, self._drop, self._forget = self._pages.take, self._pages.drop, self._pages.forget
        self._pages.take, self._pages.drop = self._checked_take, self._poisoned_drop
        self._pages.forget = self._poisoned_forget
        self.spoilt: list[int] = []

    def check(self) -> None:
        self.spoilt += self._spoilt(self._free())
        assert self.spoilt == []

    def _free(self) -> list[int]:
        return [*self._pages._settled, *self._pages._limbo]

    def _checked_take(self, count: int, *, settled: bool = False) -> list[int]:
        pages = self._take(count, settled=settled)
        self.spoilt += self._spoilt(pages)
        return pages

    def _poisoned_drop(self, pages: Any) -> None:
        pages = list(pages)
        self._drop(pages)
        self._poison(set(pages) & set(self._free()))

    def _poisoned_forget(self, page: int) -> None:
        self._forget(page)
        self._poison({page})

    def _poison(self, pages: set[int]) -> None:
        for page in pages:
            self._tensor[page] = self.VALUE
            self.freed += 1

    def _spoilt(self, pages: list[int]) -> list[int]:
        return [page for page in pages if not (self._tensor[page] == self.VALUE).all()]
