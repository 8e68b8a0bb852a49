"""The leases that an owner has alive, where pullers of its host can see them: one word per lease in a file.

A puller that sees its handle's word after it has read its last byte has the owner's answer to Release: the
owner strikes the word out before anything else may be written to the pages. So the answer need not be waited
for. An owner that is dead or stopped writes to no page either: its word stays, and is right.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import Export
from kv_transfer.area import create_file
from kv_transfer.host_files import HostFile

LEASES_PER_PAGE = 2
"""A prompt has a lease for the target's KV and one for the draft's, and a page that it shares with none."""


class LeaseBoard:
    """The owner's. `path`: a new file, which `close` removes. `pages`: of its pool, so that at the most half
    of the places are taken.
    """

    def __init__(self, path: Path, pages: int) -> None:
        self._path = path
        self._words = memoryview(create_file(path, 8 * 2 * LEASES_PER_PAGE * pages)).cast("Q")

    def new_id(self) -> int:
        """An id below 2**63 that no peer can guess, with a place of its own on the board."""
        while True:
            lease = secrets.randbits(63)
            if lease and not self._words[lease % len(self._words)]:
                return lease

    def post(self, lease: int) -> None:
        """The pages of this lease stay as they are until `strike`."""
        self._words[lease % len(self._words)] = lease

    def strike(self, lease: int) -> None:
        """Strikes a lease out: its pages may be written to."""
        self._words[lease % len(self._words)] = 0

    def export(self) -> Export:
        """Returns the fields by which pullers find it."""
        return HostFile.at(str(self._path)).export()

    def close(self) -> None:
        """Removes the board: no puller finds it any more; a puller that has it open still reads it."""
        self._path.unlink(missing_ok=True)


class LeaseBoardView:
    """A puller's view of the board of one incarnation of an owner."""

    @classmethod
    def find(cls, export: Export, folder: str) -> LeaseBoardView | None:
        """The board that an owner exports; None if it is not in `folder` of this host, or gone."""
        try:
            return cls(HostFile.find(export, folder).path)
        except ConfigError:
            return None
        except (OSError, ValueError, TypeError):  # it ends at this moment, or is no list of words
            return None

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            self._words = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)).cast("Q")
        finally:
            os.close(descriptor)

    def holds(self, lease: int) -> bool:
        """Whether the pages of this lease are still what they were."""
        return self._words[lease % len(self._words)] == lease
