"""How tests share processes: a file stays in one, whole clusters in one, and folders are mixed."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

from xdist.remote import Producer

from tests import conftest

WAITS, WORKS = 3, 9  # files


def ids() -> list[str]:
    """As pytest collects them: folder by folder, three tests per file."""
    files = ["tests/e2e/test_a.py", "tests/e2e/test_b.py"]
    files += [f"tests/rpc/test_{i}.py" for i in range(WAITS)]
    files += [f"tests/unit/test_{i}.py" for i in range(WORKS)]
    return [f"{file}::{name}" for file in files for name in ("test_x", "test_y[tests/e2e::]", "Test::test_z")]


def test_clusters_come_first_and_folders_are_mixed() -> None:
    items: Any = [SimpleNamespace(nodeid=id) for id in ids()]
    conftest.pytest_collection_modifyitems(items)
    found = [item.nodeid for item in items]
    assert sorted(found) == sorted(ids())
    files = [file for file, _ in groupby(found, lambda id: id.partition("::")[0])]
    assert len(files) == len(set(files)), "a file is torn apart"
    assert files[:2] == ["tests/e2e/test_a.py", "tests/e2e/test_b.py"]
    places = [i for i, file in enumerate(files[2:]) if "/rpc/" in file]
    assert places == [0, 4, 8]


def test_a_file_is_one_unit_and_so_are_all_clusters() -> None:
    config: Any = SimpleNamespace(
        getvalue=lambda name: ["popen"], option=SimpleNamespace(loadscopereorder=True)
    )
    scheduler = conftest.pytest_xdist_make_scheduler(config, Producer("units"))
    units = {scheduler._split_scope(id) for id in ids()}  # type: ignore[attr-defined]
    assert len(units) == 1 + WAITS + WORKS
    assert not config.option.loadscopereorder, "the order is ours"
