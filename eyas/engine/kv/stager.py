"""Copies of a device's pages for the front, which sends them: made when it asks, kept until it has sent them.

How many windows a stream has, and what becomes of their bytes, is the front's business; whether pages may be
read, that of the leases. Slots are shared between pullers: one that has stopped holds some for a while, and
never all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from eyas.common.errors import EyasError, TransferFailed
from eyas.common.types import KvKind
from eyas.engine.ipc.messages import PagesStaged, StagePages, UnstagePages, WireFailure
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.slots import SlotAllocator
from eyas.engine.kv.staging import PageStaging
from kv_transfer.slot_quota import SlotQuota


@dataclass(frozen=True)
class StagingOutlet:
    """The exit of pages of one group: slots of its staging. `proof`: the number of its proof page."""

    staging: PageStaging
    slots: SlotAllocator
    proof: int
    quota: SlotQuota = field(default_factory=SlotQuota)


@dataclass
class _StagedCall:
    """Slots of a call, from its copy's begin until nothing uses them."""

    outlet: StagingOutlet
    puller: str
    slots: list[int]
    copying: bool = True
    needed: bool = True


@dataclass
class PageStager:
    """All calls of the front. Those of a group are served in the order in which they came, but for those of
    pullers that hold as many slots as they may.

    `covers`: whether some pages of a group are under the lease of a handle now.
    """

    outlets: Mapping[KvKind, StagingOutlet]
    covers: Callable[[int, KvKind, tuple[int, ...]], bool]
    outbox: EventOutbox
    _waiting: dict[int, StagePages] = field(default_factory=dict)  # by call
    _calls: dict[int, _StagedCall] = field(default_factory=dict)  # by call

    @property
    def copying(self) -> bool:
        """True if `poll` will have something to report soon, without anything else happening."""
        return any(staged.copying for staged in self._calls.values())

    def stage(self, command: StagePages) -> None:
        """Copies pages as soon as there are slots; one `PagesStaged` follows, unless they are unstaged
        before."""
        self._waiting[command.call] = command
        self._begin()

    def unstage(self, command: UnstagePages) -> None:
        """The call's slots are free as soon as nothing is copied there. Unknown calls are no-ops."""
        self._waiting.pop(command.call, None)
        staged = self._calls.get(command.call)
        if staged is not None:
            staged.needed = False
            self._settle(command.call, staged)
        self._begin()

    def poll(self) -> None:
        """Runs once a loop: reports the copies that have stopped."""
        for outlet in self.outlets.values():
            outlet.staging.poll()

    def _begin(self) -> None:
        full: set[KvKind] = set()
        served: set[tuple[KvKind, str]] = set()  # pullers with as many slots as they may have
        for command in list(self._waiting.values()):
            puller = command.group, command.puller
            if command.group in full or puller in served:
                continue  # it waits behind one that came before it
            error = self._refusal(command)
            if error is not None:
                del self._waiting[command.call]
                self._refuse(command.call, error)
            elif not self._allowed(command):
                served.add(puller)
            elif not self._copy(command):
                full.add(command.group)

    def _allowed(self, command: StagePages) -> bool:
        outlet = self.outlets[command.group]
        return outlet.quota.allows(command.puller, _slots(outlet, command), outlet.slots.free)

    def _refusal(self, command: StagePages) -> TransferFailed | None:
        outlet = self.outlets.get(command.group)
        if outlet is None or _slots(outlet, command) > outlet.slots.total:
            return TransferFailed(
                f"{len(command.pages)} {command.group} pages cannot be staged here together"
            )
        if command.share.on_device and not outlet.staging.on_devices:
            return TransferFailed("this worker has no staging in the memory of its devices")
        proof = command.handle == 0 and set(command.pages) == {outlet.proof}
        if proof or self.covers(command.handle, command.group, command.pages):
            return None
        return TransferFailed(f"pages of the {command.group} group are not under the lease of a handle")

    def _copy(self, command: StagePages) -> bool:
        """False if there are too few slots now."""
        outlet = self.outlets[command.group]
        slots = outlet.slots.take(_slots(outlet, command))
        if slots is None:
            return False
        del self._waiting[command.call]
        outlet.quota.taken(command.puller, len(slots))
        self._calls[command.call] = staged = _StagedCall(outlet, command.puller, slots)
        copied = partial(self._copied, command.call, staged)
        outlet.staging.copy_out(command.pages, slots, copied, command.share)
        return True

    def _copied(self, call: int, staged: _StagedCall, error: EyasError | None) -> None:
        staged.copying = False
        if staged.needed and error is None:
            self.outbox.add(PagesStaged(call, tuple(staged.slots)))
            return
        if staged.needed and error is not None:
            staged.needed = False
            self._refuse(call, error)
        self._settle(call, staged)
        self._begin()

    def _settle(self, call: int, staged: _StagedCall) -> None:
        if not staged.needed and not staged.copying:
            del self._calls[call]
            staged.outlet.slots.give(staged.slots)
            staged.outlet.quota.given(staged.puller, len(staged.slots))

    def _refuse(self, call: int, error: EyasError) -> None:
        self.outbox.add(PagesStaged(call, failure=WireFailure.of(error)))


def _slots(outlet: StagingOutlet, command: StagePages) -> int:
    return outlet.staging.slots_for(len(command.pages), command.share)
