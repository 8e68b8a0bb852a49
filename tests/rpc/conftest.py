"""What the many fronts of these tests share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from unittest import mock

import pytest

from gateway.formats import chat_request


@pytest.fixture(scope="session", autouse=True)
def one_dialect() -> Iterator[None]:
    """A template's dialect is worked out once: it is most of what a front takes to be made."""
    with mock.patch.object(chat_request, "dialect_of", functools.cache(chat_request.dialect_of)):
        yield
