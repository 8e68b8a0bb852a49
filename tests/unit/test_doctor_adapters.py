"""`eyas doctor` names the adapters of a cluster, and the worker that lacks one."""

from __future__ import annotations

import pytest

from eyas.doctor import adapters


def worker(name: str, *names: str) -> dict[str, object]:
    return {"worker": name, "adapters": {"revision": 1, "adapters": [{"name": each} for each in names]}}


def test_a_worker_that_lacks_an_adapter_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    draft = {"worker": "d", "adapters": None}
    assert adapters([worker("a", "x", "y"), worker("b", "x"), draft]) == [
        "worker b lacks the adapter y: its log says why"
    ]
    assert capsys.readouterr().out == "  adapters: x, y\n"
    assert adapters([worker("a"), draft]) == [] and capsys.readouterr().out == ""
