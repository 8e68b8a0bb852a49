"""The engine process of a worker: one engine with its link to the front, which it does not outlive."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from eyas.common import logging as eyas_logging
from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError
from eyas.common.machine.memory import uncollected
from eyas.common.machine.processes import signal_on_parent_death
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import EngineStopped, WireFailure
from eyas.engine.loading.beside_imports import prepare
from eyas.engine.loading.first_tiles import search_first
from eyas.engine.loading.read_ahead import read_ahead
from eyas.engine.loading.startup import EngineStart, StartPhases
from eyas.worker.link import ZmqEngine


def main(config: EngineConfig, endpoint: str) -> None:
    """Loads and runs the engine for `config` until `ShutdownEngine`, or the end of its front."""
    eyas_logging.setup("engine", config.log_format, config.log_level)
    serve(lambda link: _run(config, link), endpoint)


def serve(engine: Callable[[EngineLink], None], endpoint: str) -> None:
    """Runs `engine` in this process. An exception becomes a last `EngineStopped` event, and exit code 1.

    Only the front handles signals to exit: it drains and sends `ShutdownEngine`. This process ignores them,
    because a terminal, systemd and `timeout` signal every process of a group.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _exit)
    signal_on_parent_death(signal.SIGUSR1)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        sys.exit(1)  # the parent ended before the signal was set up
    link = ZmqEngine(endpoint)
    try:
        engine(link)
    except Exception as error:
        link.send([EngineStopped(_failure(error))])
        sys.exit(1)
    finally:
        link.close()


def _exit(*_: object) -> NoReturn:
    """Exits by an exception, so that the engine unlinks its pools. Only once: the death of a front may send
    one signal per thread.
    """
    signal.signal(signal.SIGUSR1, _ignore)
    sys.exit(1)


def _ignore(*_: object) -> None:
    """Ignores a signal. With SIG_IGN, a signal that is already pending would raise an error."""


def _run(config: EngineConfig, link: EngineLink) -> None:
    phases = StartPhases()
    if config.load_format != "dummy" and not config.only_drafts:
        read_ahead(Path(config.model))
    search_first(config, phases)
    start = EngineStart.of(config, phases)
    prepare(config.device)
    with start.phases("import"), uncollected():
        import torch

        from eyas.engine.loading.build import build_engine
    torch.set_num_threads(config.threads)
    build_engine(config, link, start).run()


def _failure(error: Exception) -> WireFailure:
    if isinstance(error, EyasError):
        return WireFailure.of(error)
    logging.getLogger("eyas.engine").error("the engine failed", exc_info=error)
    return WireFailure.of(EyasError(f"the engine failed: {type(error).__name__}: {error}"))
