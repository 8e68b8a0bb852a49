"""The engine process of a worker: one engine, alone with its link, living no longer than its front."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys

from eyas.common import logging as eyas_logging
from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError
from eyas.engine.messages import Failure, Stopped
from eyas.worker.lifeline import signal_on_parent_death
from eyas.worker.link import ZmqEngine


def main(config: EngineConfig, endpoint: str) -> None:
    """Runs until `Shutdown`, or SIGTERM (also sent by the kernel when the front dies)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's; it says Shutdown
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that the pool is unlinked
    signal_on_parent_death()
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        sys.exit(1)  # it died before we could ask for the signal
    eyas_logging.setup("engine")
    link = ZmqEngine(endpoint)
    try:
        failure = _run(config, link)
        if failure is not None:
            link.send([Stopped(failure)])
            sys.exit(1)
    finally:
        link.close()


def _run(config: EngineConfig, link: ZmqEngine) -> Failure | None:
    """None if the engine was asked to leave, else why it left."""
    import torch

    from eyas.engine.build import build_engine

    torch.set_num_threads(config.threads)
    try:
        build_engine(config, link).run()
    except EyasError as error:
        return Failure(error.code, error.message)
    except Exception as error:
        logging.getLogger("eyas.engine").exception("the engine failed")
        return Failure(EyasError.code, f"the engine failed: {type(error).__name__}: {error}")
    return None
