"""The page table of a sequence in one group of layers: its pages by position, none behind a window."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class PageTable:
    """`pages`: by position. The sequence has given the first `gone` of them back: their numbers mean nothing.

    `tail`: the last ones of a prompt, which others may read; they follow `pages` once those reach them.
    """

    pages: list[int] = field(default_factory=list)
    gone: int = 0
    tail: list[int] = field(default_factory=list)

    @property
    def owned(self) -> list[int]:
        """The pages that the sequence has."""
        return [*self.pages[self.gone :], *self.tail] if self.gone or self.tail else self.pages

    @property
    def there(self) -> list[int]:
        """The pages by position, with -1 for those that are given back."""
        return [-1] * self.gone + self.pages[self.gone :] if self.gone else self.pages
