"""Readiness probes of a cluster's processes: workers by gRPC, the gateway by HTTP.

The libraries take half a second to import, so a cluster imports this module after it has started its
processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import httpx

from eyas.common.security.tls import service_tls
from eyas.common.wire import rpc

PROBE_S = 1.0


class ClusterProbe:
    """Polls a starting cluster. `workers`: the addresses, by name, of the workers that do not serve yet.

    Use it as an async context manager.
    """

    def __init__(self, workers: Mapping[str, str], gateway: str, tls_dir: str | None) -> None:
        """`gateway`: its URL; `tls_dir`: of the services. Raises ConfigError if `tls_dir` cannot be used."""
        self.workers = dict(workers)
        self._gateway = gateway
        self._dial = rpc.dialer(service_tls(tls_dir))
        # The certificate is valid for the names that callers use, and only our own child process is probed.
        self._http = httpx.AsyncClient(timeout=PROBE_S, trust_env=False, verify=False)

    async def __aenter__(self) -> ClusterProbe:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def serving(self) -> bool:
        """Whether every worker is SERVING and the gateway reports that a request would succeed."""
        for name, address in list(self.workers.items()):
            async with self._dial(address) as channel:
                if await rpc.is_serving(channel, PROBE_S):
                    del self.workers[name]
        if self.workers:
            return False
        try:
            return (await self._http.get(self._gateway + "/health")).status_code == 200
        except httpx.HTTPError:
            return False
