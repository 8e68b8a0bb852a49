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

    Signals that ask to leave are the front's: it drains and sends Shutdown. A terminal, systemd and `timeout`
    tell every process of a group, so they tell this one too.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _unwind)
    signal_on_parent_death(signal.SIGUSR1)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        sys.exit(1)  # the parent ended before we asked for the signal
    link = ZmqEngine(endpoint)
    try:
        engine(link)
    except Exception as error:
        link.send([EngineStopped(_failure(error))])
        sys.exit(1)
    finally:
        link.close()


def _unwind(*_: object) -> NoReturn:
    """Ends the engine so that its pools are unlinked; once, as a front that dies may be told per thread."""
    signal.signal(signal.SIGUSR1, _pass_over)
    sys.exit(1)


def _pass_over(*_: object) -> None:
    """Passes a signal over. SIG_IGN would make an error of one that is on its way already."""


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
