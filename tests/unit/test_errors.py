"""The exception tree: one status each, and a class that survives the wire."""

from __future__ import annotations

from http import HTTPStatus

import grpc
import pytest

from eyas.common import errors
from eyas.common.errors import EyasError, from_code, from_grpc_status

TREE = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, EyasError)]


@pytest.mark.parametrize("cls", TREE)
def test_every_class_survives_its_code(cls: type[EyasError]) -> None:
    again = from_code(cls.code, "the field is wrong", "field")
    assert (type(again), again.message, again.param) == (cls, "the field is wrong", "field")


def test_codes_are_unique_and_statuses_exist() -> None:
    assert len({cls.code for cls in TREE}) == len(TREE)
    for cls in TREE:
        assert cls.grpc_status in grpc.StatusCode.__members__
        assert cls.http_status == 499 or HTTPStatus(cls.http_status) >= 400


def test_a_bare_status_gives_the_most_general_class() -> None:
    assert type(from_grpc_status("INVALID_ARGUMENT", "no")) is errors.InvalidRequest
    assert type(from_grpc_status("DATA_LOSS", "no")) is EyasError


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(from_code("from the future", "no")) is EyasError
