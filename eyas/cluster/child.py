"""One supervised process, in its own process group: its log lines are forwarded, and it is stopped in time.

`keep` restarts a process whenever it dies, with increasing pauses. The cluster decides which processes are
restarted, and the order in which they stop.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

POLL_S = 0.05
SLOWEST_POLL_S = 0.25  # for a process that keeps running: a poll costs 0.1 ms
LOG_TAIL = 40  # the last lines, for a failure report

LogLine = Callable[[str, str], None]  # (name of the process, line)
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # before the first, second, ... restart, and all later ones
STEADY_S = 60.0  # after a run of this length, earlier deaths no longer count


class ChildProcess:
    """A child process in its own session, so that Ctrl-C reaches the supervisor only.

    The child ends when our end of the pipe on its standard input closes, for any reason.
    """

    def __init__(
        self, name: str, argv: tuple[str, ...], log: LogLine, env: Mapping[str, str] | None = None
    ) -> None:
        """`env` None: the environment of this process."""
        self.name = name
        self.argv = argv
        self.tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL)
        self._log = log
        self._env = env
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.started_at = 0.0

    def start(self) -> None:
        """Starts the process. Call it from the main thread: the parent-death signal follows threads."""
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            self.argv,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._forward, args=(self._process,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """The process id of the latest start; None if it was never started."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """The exit code: None while it runs, or if it was never started; negative if a signal ended it."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        """Whether the process itself runs."""
        return self._process is not None and self._process.poll() is None

    async def exited(self) -> int:
        """Waits for the process itself (a grandchild may keep its log pipe open); returns its exit code."""
        pause = POLL_S
        while self.running:
            await asyncio.sleep(pause)
            pause = min(1.1 * pause, SLOWEST_POLL_S)
        return self.returncode or 0

    async def stop(self, grace_s: float, word: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal `word`, waits up to `grace_s` seconds, then kills the rest of the group."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(word)
            try:
                async with asyncio.timeout(grace_s):
                    await self.exited()
            except TimeoutError:
                self._log(self.name, f"did not stop within {grace_s:g} s: killed")
        self.kill()

    def kill(self) -> None:
        """Kills the whole group, reaps the process and closes its pipes. Does nothing if it never started."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the group is empty
        self._process.wait(timeout=5)
        if self._process.stdin:
            self._process.stdin.close()
        if self._reader:
            self._reader.join(timeout=1)

    def _forward(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        with process.stdout as lines:
            for line in lines:
                self.tail.append(line.rstrip())
                self._log(self.name, line.rstrip())


async def keep(child: ChildProcess, log: LogLine) -> None:
    """Restarts a process, which runs already, whenever it dies, until cancelled."""
    deaths = 0
    while True:
        code = await child.exited()
        deaths = 1 if time.monotonic() - child.started_at > STEADY_S else deaths + 1
        pause = BACKOFF_S[min(deaths, len(BACKOFF_S)) - 1]
        log(child.name, f"ended with code {code}; starting it again in {pause:g} s")
        child.kill()  # the rest of its group would keep its port and its pool
        await asyncio.sleep(pause)
        await _start(child, log)


async def _start(child: ChildProcess, log: LogLine) -> None:
    """Starts a process; retries until it succeeds, as memory may be short for a moment, or the program is
    just being replaced.
    """
    while True:
        try:
            child.start()
            return
        except OSError as error:
            pause = BACKOFF_S[-1]
            log(child.name, f"cannot be started ({error.strerror}); trying again in {pause:g} s")
        await asyncio.sleep(pause)
