"""Ends a supervised process when its supervisor ends, for whatever reason.

It uses two independent means, because each alone has a gap: the kernel's parent-death signal (immediate,
Linux only, not sent if the parent died before it was asked for), and end-of-file on standard input, whose
other end the supervisor holds open. It asks the process to end, and then kills it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
GRACE_S = 8.0


def die_with_parent(grace_s: float = GRACE_S) -> None:
    """Call it once, early, in a process whose parent holds a pipe open on its standard input.

    When the parent ends, this process gets SIGHUP, which means: leave now. If it still runs `grace_s` seconds
    later, it gets SIGKILL, together with its process group if it leads one.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the supervisor and so this process ignore it
    signal_on_parent_death(signal.SIGHUP)
    threading.Thread(target=_watch_stdin, args=(grace_s,), name="lifeline", daemon=True).start()


def signal_on_parent_death(number: signal.Signals) -> None:
    """Makes the kernel send the signal when the thread that started this process ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _watch_stdin(grace_s: float) -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(grace_s)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
