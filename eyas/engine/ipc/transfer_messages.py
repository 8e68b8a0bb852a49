"""What a worker's front and its engine say to each other about KV transfers: a part of its `messages`.

The owner of the pages hears of Watches and Releases; the puller hears what its front was told by an owner,
and asks for copies that only fronts can make.
"""

from __future__ import annotations

from eyas.common.pool import PoolInfo
from eyas.common.types import FirstToken, KvHandle
from eyas.engine.ipc.message import Failure, Message

# --- commands: owner side (this worker holds the pages) ----------------------------------------------


class WatchOpened(Message, frozen=True):
    """A puller opened (or raised to a higher attempt) its Watch: the lease is alive while it stays open."""

    watch: int  # the front's number for this stream; WatchUpdate events carry it back
    handle: KvHandle
    attempt: int


class WatchClosed(Message, frozen=True):
    watch: int


class Release(Message, frozen=True):
    """The puller read its last byte: answered by `Released` with the same `call`."""

    call: int
    handle: int
    epoch: int
    attempt: int


# --- commands: puller side (this worker pulls pages) -------------------------------------------------


class PullMet(Message, frozen=True):
    """The owner's pages mean what ours mean, and this is how they can be reached."""

    pull: int
    pool: PoolInfo


class PullReady(Message, frozen=True):
    """The owner's rows below `tokens` may be read. `pull` is the number of the `OpenPull` event."""

    pull: int
    tokens: int


class PullDone(Message, frozen=True):
    """The owner finished: token 0 of every choice, and the last feature (float32 bytes) for the drafter."""

    pull: int
    choices: tuple[FirstToken, ...]
    last_feature: bytes = b""


class PullFailed(Message, frozen=True):
    """The Watch ended without `PullDone`, or the owner said Failed."""

    pull: int
    failure: Failure


class PullReleased(Message, frozen=True):
    """The owner's verdict on `ReleasePull`: only a valid one makes the pulled pages usable."""

    pull: int
    valid: bool


class CopyStopped(Message, frozen=True):
    """The answer to `CopyPages`: nothing touches its destination pages any more, whatever `failure` says."""

    pull: int
    number: int
    bytes: int
    seconds: float
    failure: Failure | None = None


# --- events: owner side ------------------------------------------------------------------------------


class WatchUpdate(Message, frozen=True):
    """For the Watch stream `watch`: rows readable so far; then done, or failed (which ends the stream)."""

    watch: int
    tokens: int = 0
    done: bool = False
    choices: tuple[FirstToken, ...] = ()
    last_feature: bytes = b""
    failure: Failure | None = None


class Released(Message, frozen=True):
    call: int
    valid: bool


# --- events: puller side -----------------------------------------------------------------------------


class OpenPull(Message, frozen=True):
    """Please open a Watch on handle.worker and relay it as Pull* commands carrying `pull`."""

    pull: int
    handle: KvHandle
    attempt: int


class CopyPages(Message, frozen=True):
    """Please fetch the owner's `pages` into our file's `dst_pages`; answered by one `CopyStopped`.

    `proof`: its proof page, which no handle names.
    """

    pull: int
    number: int
    pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    proof: bool = False


class StopCopy(Message, frozen=True):
    """Please end this fetch, if it still runs; the Watch stays open."""

    pull: int
    number: int


class ReleasePull(Message, frozen=True):
    """Please call Release on the handle's owner; the answer comes back as `PullReleased`."""

    pull: int


class ClosePull(Message, frozen=True):
    """Please end the Watch of `pull` and its fetches; nothing more is relayed but their `CopyStopped`."""

    pull: int
