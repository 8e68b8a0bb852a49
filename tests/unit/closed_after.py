"""What a test makes ends with it, wherever in the test it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

Made = TypeVar("Made")


def closed_after(kind: type[Made], close: Callable[[Made], object]) -> Any:
    """A fixture for every test of a file: all objects of this class are closed after it."""

    @pytest.fixture(autouse=True)
    def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        made: list[Made] = []
        begin = kind.__init__

        def noted(it: Made, *args: Any, **kwargs: Any) -> None:
            begin(it, *args, **kwargs)
            made.append(it)

        monkeypatch.setattr(kind, "__init__", noted)
        yield
        for it in made:
            close(it)

    return closing
