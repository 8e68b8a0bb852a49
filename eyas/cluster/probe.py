"""A cluster's processes as they are asked whether they serve: workers by gRPC, the gateway by HTTP.

These libraries take half a second to import, which a cluster spends once its processes have started.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import httpx

from eyas.common.security.tls import service_tls
from eyas.common.wire import rpc

PROBE_S = 1.0


class ClusterProbe:
    """An async context manager. `workers`: their addresses by name, those left that do not serve yet."""

    def __init__(self, workers: Mapping[str, str], gateway: str, tls_dir: str | None) -> None:
        """`gateway`: its URL; `tls_dir`: of the services. Raises ConfigError for what is wrong with it."""
        self.workers = dict(workers)
        self._gateway = gateway
        self._dial = rpc.dialer(service_tls(tls_dir))
        # The certificate is for the names that callers use. Here only our own child is asked how it is.
        self._http = httpx.AsyncClient(timeout=PROBE_S, trust_env=False, verify=False)

    async def __aenter__(self) -> ClusterProbe:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def serving(self) -> bool:
        """Whether every worker says SERVING and the gateway says that a request would succeed."""
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
