"""Who may call, and under which name."""

from __future__ import annotations

import pytest

from eyas.common.errors import Unauthorized
from gateway.keys import Keys


def test_callers_have_names_that_tell_keys_apart_and_do_not_show_them() -> None:
    keys = Keys(["first-key", "second-key"])
    names = [keys.caller(f"Bearer {key}") for key in ("first-key", "second-key")]
    assert len(set(names)) == 2 and all(names)
    assert not any("key" in name for name in names)
    assert names[0] == Keys(["first-key"]).caller("Bearer first-key")  # after a restart, at another gateway


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "first-key", "Bearer first-ke", "bearer first-key"]
)
def test_others_are_not_let_in(given: str | None) -> None:
    with pytest.raises(Unauthorized, match="Bearer KEY"):
        Keys(["first-key", "second-key"]).caller(given)


def test_without_keys_the_door_is_open() -> None:
    assert Keys([]).caller(None) == Keys([]).caller("Bearer anything") == ""
