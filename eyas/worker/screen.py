"""What a person sees of a cluster: a line while it starts, its addresses when it is ready, its logs.

The addresses go to standard output, everything else to standard error. On a terminal the starting line
moves; elsewhere it is printed once.
"""

from __future__ import annotations

from rich.console import Console

from eyas.common.config import ServeConfig
from eyas.worker.serve import LocalCluster, Work, run_cluster


def run_on_screen(config: ServeConfig, work: Work, *, quiet: bool = False) -> int:
    """`run_cluster` with a person watching: its start, its addresses, its end, and (not `quiet`) its logs."""
    screen = Screen(quiet=quiet)
    cluster = LocalCluster(config, screen.log, screen.progress)

    async def announced(cluster: LocalCluster) -> int:
        screen.ready(cluster)
        return await work(cluster)

    try:
        return run_cluster(cluster, announced, lambda: screen.stopping(cluster.drain_s))
    finally:
        screen.close()


class Screen:
    """`log` and `progress` are what `LocalCluster` asks for. `quiet` keeps the logs back."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._status = self._console.status("")
        self._began = False

    def log(self, name: str, line: str) -> None:
        """One line of a process's log. Called from any thread."""
        if not self._quiet:
            self._console.print(f"[{name}] {line}", markup=False)

    def progress(self, silent: list[str], waited_s: float) -> None:
        """How far the start is: the processes that do not listen yet."""
        if self._console.is_terminal:
            self._status.start()
            self._status.update(f"starting {', '.join(silent) or 'up'} ({waited_s:.0f} s)")
        elif not self._began:
            self._console.print(f"starting {', '.join(silent)}", markup=False)
        self._began = True

    def stopping(self, drain_s: float) -> None:
        """It was asked to stop, and that may take a while."""
        self.close()
        wait = f" (open requests may finish within {drain_s:g} s)" if drain_s else ""
        self._console.print(f"stopping{wait}; Ctrl-C again to stop now", markup=False)

    def close(self) -> None:
        """Ends the starting line, for better or worse."""
        self._status.stop()

    def ready(self, cluster: LocalCluster) -> None:
        """The addresses of a cluster that answers."""
        self.close()
        print(f"{cluster.model} is ready after {cluster.start_s:.1f} s: {', '.join(cluster.pids)}")
        print(f"  OpenAI API  {cluster.url}/v1")
        print(f"  gRPC        {cluster.grpc_address}", flush=True)
