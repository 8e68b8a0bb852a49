"""The terminal output of a cluster: a line while it starts, its addresses when it is ready, its logs.

The addresses go to standard output, everything else to standard error. On a terminal the starting line is
updated; otherwise it is printed once. With JSON logs, every line of standard error is JSON.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from rich.console import Console

from eyas.cluster.serve import LocalCluster, Work, run_cluster
from eyas.common import logging as eyas_logging
from eyas.common.config import ServeConfig


def run_on_screen(config: ServeConfig, work: Work, *, quiet: bool = False, notes: Sequence[str] = ()) -> int:
    """`run_cluster`, with its start, addresses, end and (unless `quiet`) logs on the terminal.

    `notes`: lines to log before any other.
    """
    json = config.engine.log_format == "json"
    screen = ClusterScreen(quiet=quiet, json=json)
    cluster = LocalCluster(config, screen.log, screen.progress)
    for note in notes:
        screen.log("eyas", note)

    async def announced(cluster: LocalCluster) -> int:
        screen.ready(cluster)
        return await work(cluster)

    try:
        return run_cluster(cluster, announced, lambda: screen.stopping(cluster.drain_s))
    finally:
        screen.close()


class ClusterScreen:
    """Prints the output of a `LocalCluster`, by its callbacks `log` and `progress`. Lines that cannot be
    written are lost, so that a full disk does not end a server.

    `quiet`: no logs. `json`: each line of standard error is a record, as `eyas.common.logging` writes them.
    """

    def __init__(self, *, quiet: bool, json: bool = False) -> None:
        self._quiet = quiet
        self._json = json
        # A quiet cluster belongs to a tool, whose output often goes to the same pipe and must not be lost.
        self._file = sys.stderr if quiet else cast(TextIO, eyas_logging.LossyFile(sys.stderr))
        self._console = Console(file=self._file, soft_wrap=True, highlight=False)
        self._status = self._console.status("")
        self._began = False

    def log(self, name: str, line: str) -> None:
        """Prints one line of a process's log. Any thread may call it."""
        if self._quiet:
            return
        if self._json:
            self._file.write(eyas_logging.as_record(name, line) + "\n")  # whole: threads share it
        else:
            self._console.print(f"[{name}] {line}", markup=False)

    def _print(self, line: str) -> None:
        if self._json:
            eyas_logging.announce(line)
        else:
            self._console.print(line, markup=False)

    def progress(self, silent: list[str], waited_s: float) -> None:
        """Shows the progress of the start: the processes that are not ready yet."""
        if self._console.is_terminal and not self._json:
            self._status.start()
            self._status.update(f"starting {', '.join(silent) or 'up'} ({waited_s:.0f} s)")
        elif not self._began:
            self._print(f"starting {', '.join(silent)}")
        self._began = True

    def stopping(self, drain_s: float) -> None:
        """Prints that the cluster stops, and how long that may take."""
        self.close()
        wait = f" (open requests may finish within {drain_s:g} s)" if drain_s else ""
        self._print(f"stopping{wait}; Ctrl-C again to stop now")

    def close(self) -> None:
        """Removes the starting line."""
        self._status.stop()

    def ready(self, cluster: LocalCluster) -> None:
        """Prints the addresses of a cluster that is ready."""
        self.close()
        with contextlib.suppress(OSError):
            print(f"{cluster.model} is ready after {cluster.start_s:.1f} s: {', '.join(cluster.pids)}")
            print(f"  OpenAI API  {cluster.url}/v1")
            print(f"  gRPC        {cluster.grpc_address}", flush=True)
