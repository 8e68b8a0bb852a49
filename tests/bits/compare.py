"""Whether a row has the same bits in every company: what several runs say of the same row is compared.

It knows keys, tensors and names. What a row is, and in which company it runs, the tables of kernels beside it
say. Zeros of either sign count as the same: no kernel here tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Composition:
    """Rows that run together: `run` returns what each of them, by its key, leaves behind."""

    name: str
    run: Callable[[], Mapping[Hashable, torch.Tensor]]


@dataclass(frozen=True)
class Difference:
    """The first element in which a row of two compositions differs, how far, and how many others do."""

    key: Hashable
    first: str
    other: str
    place: int
    ulps: int
    count: int

    def __str__(self) -> str:
        what = f"{self.count} elements differ, the first at {self.place} by {self.ulps} ulp"
        return f"{self.key}: {self.first!r} against {self.other!r}: {what}"


def differences(compositions: Iterable[Composition]) -> list[Difference]:
    """Of every row that runs in more than one composition, each against the first that it ran in."""
    first: dict[Hashable, tuple[str, torch.Tensor]] = {}
    found = []
    for composition in compositions:
        for key, bits in composition.run().items():
            name, known = first.setdefault(key, (composition.name, bits.clone()))
            if not torch.equal(known, bits):
                found.append(difference(key, (name, known), (composition.name, bits)))
    return found


def difference(key: Hashable, one: tuple[str, torch.Tensor], other: tuple[str, torch.Tensor]) -> Difference:
    """Of two tensors that are not equal."""
    a, b = one[1].flatten(), other[1].flatten()
    places = (a != b).nonzero()[:, 0]  # NaN differs from itself
    at = int(places[0])
    return Difference(key, one[0], other[0], at, abs(ordered(a[at]) - ordered(b[at])), len(places))


def ordered(number: torch.Tensor) -> int:
    """A number's place among all of its type."""
    bits = int(number.view(_BITS[number.element_size()]))
    return bits if bits >= 0 else -(bits & (1 << 8 * number.element_size() - 1) - 1)
