"""How tests share the cores (`pytest -n 4`): threads of each, and neighbours; Ctrl-C works in all of them."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

if "PYTEST_XDIST_WORKER" in os.environ:  # torch is not imported yet; what a test starts inherits it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts background jobs with SIGINT ignored, and their children inherit that. Tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("busy", deadline=None, max_examples=50)  # neighbours may make any example slow
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """A command that a test calls sets up the log of its process: for this test alone."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    if root.handlers != before:
        root.handlers[:] = before
        root.setLevel(level)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes by one thread: small models are faster so."""
    from tests.unit.sampling_twins import threads

    with threads(1):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: nothing looks through it for garbage, then or later.

    Garbage of tests is looked for seldom, which saves 3 % of their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _let_logs_reach_the_root()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        gc.enable()


def _let_logs_reach_the_root() -> None:
    """Torch has forty that keep theirs: pytest would listen to each, anew for every part of a test."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole clusters first, then the files of all other folders, evenly mixed: some wait, some compute."""
    folders: dict[str, dict[str, None]] = {}  # their files, each once
    for item in items:
        folders.setdefault(_file(item.nodeid).rpartition("/")[0], {})[_file(item.nodeid)] = None
    place = {file: i / len(files) for files in folders.values() for i, file in enumerate(files)}
    items.sort(key=lambda item: (not _is_cluster(item.nodeid), place[_file(item.nodeid)]))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _is_cluster(nodeid: str) -> bool:
    return nodeid.startswith("tests/e2e/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """One process runs all tests of a file, so that what its tests share is made once.

    Never two whole clusters at once: one alone has more processes than there are cores.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if _is_cluster(nodeid) else _file(nodeid)

    config.option.loadscopereorder = False  # the order is the collection's
    return ByFile(config, log)
