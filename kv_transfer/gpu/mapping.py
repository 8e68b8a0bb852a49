"""A peer's memory in this process: mapped when it is first used, until its owner ends.

An owner's death leaves the memory readable, and allocated: it is free only when all have unmapped it. So a
thread waits for the end of each owner, and unmaps at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

from eyas.common.errors import TransferFailed
from kv_transfer.gpu.driver import DriverError, GpuDriver, GpuMemory
from kv_transfer.gpu.handover import take, wait_for_end


class MappedMemory:
    """The memory of the giver at `path`, mapped for one GPU of ours."""

    def __init__(self, path: str, driver: GpuDriver) -> None:
        self._path = path
        self.driver = driver
        self._using = threading.Lock()  # by the copy that runs, or the one that maps or unmaps
        self._memory: GpuMemory | None = None
        self._giver: socket.socket | None = None
        self._watcher: threading.Thread | None = None
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the owner has ended, or we have closed it."""
        return self._gone

    @contextlib.contextmanager
    def mapped(self) -> Iterator[GpuMemory]:
        """The memory, mapped at least until the end of the `with`.

        Raises TransferFailed if the owner is gone, or gives nothing; DriverError if it cannot be mapped.
        """
        with self._using:
            yield self._map()

    def close(self) -> None:
        """Unmaps, once no copy holds it."""
        with self._using:
            self._gone = True
            if self._giver is not None:
                with contextlib.suppress(OSError):
                    self._giver.shutdown(socket.SHUT_RDWR)  # wakes the watcher
        if self._watcher is not None:
            self._watcher.join()

    def _map(self) -> GpuMemory:
        if self._gone:
            raise TransferFailed(f"the owner of {self._path} is gone")
        if self._memory is None:
            taken = take(self._path)
            try:
                self._memory = self.driver.map(taken.descriptor, taken.size)
            except DriverError:
                taken.giver.close()
                raise
            finally:
                os.close(taken.descriptor)
            self._giver = taken.giver
            self._watcher = threading.Thread(target=self._until_end, name="kv-mapping", daemon=True)
            self._watcher.start()
        return self._memory

    def _until_end(self) -> None:
        assert self._giver is not None
        wait_for_end(self._giver)
        with self._using:  # a copy that runs ends well: the memory lives as long as it is mapped
            self._gone = True
            self._giver.close()
            assert self._memory is not None
            self.driver.unmap(self._memory)
            self._memory = None
