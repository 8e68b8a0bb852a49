"""The messages between a worker's front and its engine that are about KV transfers: a part of `messages`.

The engine that owns pages hears of Watches and Releases. The engine that pulls hears what the owner told its
front, and asks its front for the copies that only fronts can make.
"""

from __future__ import annotations

from eyas.common.types import ALL_OF_RANK_0, FirstToken, KvHandle, KvKind, PageShare
from eyas.common.wire.links import PageLink
from eyas.common.wire.message import TaggedMessage, WireFailure
from eyas.common.wire.pool import PoolInfo

# --- commands: owner side (this worker holds the pages) ----------------------------------------------


class WatchOpened(TaggedMessage, frozen=True):
    """A puller opened (or raised to a higher attempt) its Watch: the lease is alive while it stays open."""

    watch: int  # the front's number for this stream; WatchUpdate events carry it back
    handle: KvHandle
    attempt: int


class WatchClosed(TaggedMessage, frozen=True):
    """The Watch stream ended."""

    watch: int


class ReleaseLease(TaggedMessage, frozen=True):
    """The puller has read its last byte. The answer is `LeaseReleased` with the same `call`; none to call
    0."""

    call: int
    handle: int
    epoch: int
    attempt: int


class StagePages(TaggedMessage, frozen=True):
    """Asks for copies of a handle's pages where the front can read them. The answer is one `PagesStaged`.

    At most `kv_transfer.layout.window_pages` of them. `handle` 0: the proof page, which no handle names.
    What comes of each page stands at the beginning of its slot; a device's slot takes several. `puller`: who
    asks, by its connection.
    """

    call: int  # the front's number for this request; all that is said of it carries that number
    group: KvKind
    handle: int
    pages: tuple[int, ...]
    puller: str
    share: PageShare = ALL_OF_RANK_0


class UnstagePages(TaggedMessage, frozen=True):
    """The front reads the copies of a `StagePages` no more, whether they were made yet or not."""

    call: int


# --- commands: puller side (this worker pulls pages) -------------------------------------------------


class PullMet(TaggedMessage, frozen=True):
    """The owner's pages have the same meaning as ours, and `pool` says how they can be reached."""

    pull: int
    pool: PoolInfo


class PullReady(TaggedMessage, frozen=True):
    """The owner's rows below `tokens` may be read. `pull` is the number of the `OpenPull` event."""

    pull: int
    tokens: int


class PullDone(TaggedMessage, frozen=True):
    """The owner finished: token 0 of every choice, and the last feature (float32 bytes) for the drafter."""

    pull: int
    choices: tuple[FirstToken, ...]
    last_feature: bytes = b""


class PullFailed(TaggedMessage, frozen=True):
    """The Watch ended without `PullDone`, or the owner said Failed."""

    pull: int
    failure: WireFailure


class PullReleased(TaggedMessage, frozen=True):
    """The owner's verdict on `ReleasePull`: only a valid one makes the pulled pages usable."""

    pull: int
    valid: bool


class ProbeLink(TaggedMessage, frozen=True):
    """Asks how fast pages come from `pool`, of the worker of that name. The answer is one `LinkProbed`.

    The copies that this takes have the number -`call` where others have that of a pull.
    """

    call: int
    worker: str
    group: KvKind
    rank: int  # the owner's
    pool: PoolInfo


class CopyStopped(TaggedMessage, frozen=True):
    """The answer to `CopyPages`: from now on nothing writes its destination pages, even after a failure."""

    pull: int
    number: int
    bytes: int
    seconds: float
    failure: WireFailure | None = None


class CopyStaged(TaggedMessage, frozen=True):
    """The answer to `StageCopy`: the owner's staging has the pages in `slots` until `CopyRead`."""

    pull: int
    number: int
    slots: tuple[int, ...]


# --- events: owner side ------------------------------------------------------------------------------


class WatchUpdate(TaggedMessage, frozen=True):
    """Progress of the Watch stream `watch`: how many rows can be read; at last done or failed,
    which ends it.
    """

    watch: int
    tokens: int = 0
    done: bool = False
    choices: tuple[FirstToken, ...] = ()
    last_feature: bytes = b""
    failure: WireFailure | None = None


class LeaseReleased(TaggedMessage, frozen=True):
    """The answer to `ReleaseLease`: `valid` if the lease never lapsed, so that the bytes read are good."""

    call: int
    valid: bool


class PagesStaged(TaggedMessage, frozen=True):
    """The answer to `StagePages`: slots of the staging file, one per page, the front's until
    `UnstagePages`."""

    call: int
    slots: tuple[int, ...] = ()
    failure: WireFailure | None = None


# --- events: puller side -----------------------------------------------------------------------------


class OpenPull(TaggedMessage, frozen=True):
    """Asks the front to open a Watch on handle.worker and to relay it as Pull* commands with `pull`.

    `known`: the worker has described these pages before; else it is asked to, and `PullMet` brings it.
    """

    pull: int
    handle: KvHandle
    attempt: int
    known: bool = False


class CopyPages(TaggedMessage, frozen=True):
    """Asks the front to fetch the owner's `pages` into our `dst_pages`. The answer is one `CopyStopped`.

    `proof`: it is the owner's proof page, which no handle names. So are all pages of a `pull` below 0. Of
    each page comes `share`, which are `width` bytes (0: all) for the beginning of ours.
    """

    pull: int
    number: int
    pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    proof: bool = False
    share: PageShare = ALL_OF_RANK_0
    width: int = 0


class StageCopy(TaggedMessage, frozen=True):
    """Asks the front to have the owner copy its `pages` to staging, which we read ourselves.

    The answer is a `CopyStaged`, unless it fails, and at last one `CopyStopped` of no bytes: without a
    failure, the pages were held until our `CopyRead`. `proof` and `share` as in `CopyPages`.
    """

    pull: int
    number: int
    pages: tuple[int, ...]
    proof: bool = False
    share: PageShare = ALL_OF_RANK_0


class CopyRead(TaggedMessage, frozen=True):
    """The slots of a `CopyStaged` have been read."""

    pull: int
    number: int


class LinkProbed(TaggedMessage, frozen=True):
    """The answer to `ProbeLink`."""

    call: int
    link: PageLink


class StopCopy(TaggedMessage, frozen=True):
    """Asks the front to end this fetch, if it still runs; the Watch stays open."""

    pull: int
    number: int


class ReleasePull(TaggedMessage, frozen=True):
    """Asks the front to call Release on the handle's owner. The answer is `PullReleased`."""

    pull: int


class ReleaseHandle(TaggedMessage, frozen=True):
    """Asks the front to call Release on the handle's owner, whose verdict is known or not needed."""

    handle: KvHandle
    attempt: int


class ClosePull(TaggedMessage, frozen=True):
    """Asks the front to end the Watch of `pull` and its fetches. Only their `CopyStopped` still follow."""

    pull: int
