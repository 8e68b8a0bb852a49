"""Cases of several parameters, of which `make test` runs some and `make test-slow` the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def crossed(*values: Iterable[object], quick: Callable[..., bool]) -> list[Any]:
    """Every value of each parameter with every one of the others; slow, unless `quick` says so of a case."""
    return [
        pytest.param(*case, marks=() if quick(*case) else pytest.mark.slow, id="-".join(map(_name, case)))
        for case in itertools.product(*values)
    ]


def _name(value: object) -> str:
    """The same in every process: what a function prints holds its address."""
    return str(getattr(value, "__name__", value))
