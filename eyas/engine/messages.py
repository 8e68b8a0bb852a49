"""What a worker's front and its engine say to each other: one batch of messages each way a step.

Commands go down to the engine, events come up. The engine decides (queues, pages, leases); the front
relays (streams, deadlines of peers, health). Plain msgspec structs: no torch, no gRPC.
"""

from __future__ import annotations

import msgspec

from eyas.common.params import SamplingParams
from eyas.common.types import Entry, FirstToken, GenerationRequest, KvHandle, Timings


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message: a tagged union member."""


class Failure(msgspec.Struct, frozen=True):
    """An `EyasError` by its wire name (`eyas.common.errors.from_code` makes it one again)."""

    code: str
    message: str
    param: str | None = None


# --- commands: generation ----------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Start a generation. `attach`: wait for `Attach` and compute nothing before it; else compute here."""

    request: GenerationRequest
    attempt: int
    attach: bool


class Attach(Message, frozen=True):
    """The KV of a waiting generation: pull `handles`, or (no handles) compute the prompt here.

    `first_tokens` comes only without handles: token 0 of each choice, if it was already delivered.
    """

    id: str
    attempt: int
    handles: tuple[KvHandle, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()


class Cancel(Message, frozen=True):
    """End one choice, or (`choice` None) the request, wherever it is. Unknown ids are no-ops."""

    id: str
    choice: int | None = None


class Prefill(Message, frozen=True):
    """Compute a prompt's KV, sample token 0 of each choice, offer the pages under leases."""

    request: GenerationRequest
    attempt: int
    offer_draft: bool


# --- commands: transfer, owner side (this worker holds the pages) --------------------------------------


class WatchOpened(Message, frozen=True):
    """A puller opened (or raised to a higher attempt) its Watch: the lease is alive while it stays open."""

    watch: int  # the front's number for this stream; WatchUpdate events carry it back
    handle: int
    epoch: int
    attempt: int


class WatchClosed(Message, frozen=True):
    watch: int


class Release(Message, frozen=True):
    """The puller read its last byte: answered by `Released` with the same `call`."""

    call: int
    handle: int
    epoch: int
    attempt: int


# --- commands: transfer, puller side (this worker pulls pages) -----------------------------------------


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


# --- draft mailbox: the same records travel decode engine -> front -> draft front -> draft engine ------


class DraftOpen(Message, frozen=True):
    """A sequence starts drafting. Rows below `base_len` come by `handle`, or do not exist (window start).

    `tokens` are all ids so far (positions 0 ..); `choice` and `prompt_len` key the sampling noise.
    """

    seq: int
    generation: int
    tokens: tuple[int, ...]
    base_len: int
    params: SamplingParams
    choice: int
    prompt_len: int
    handle: KvHandle | None = None
    attempt: int = 0


class DraftCommit(Message, frozen=True):
    """Row j is (feature of position base_len + j, token base_len + j + 1); asks for one proposal.

    `features`: float32 little-endian, [len(tokens), head width].
    """

    seq: int
    generation: int
    base_len: int
    tokens: tuple[int, ...]
    features: bytes
    steps: int
    topk: int = 1
    draft_tokens: int = 0


class DraftClose(Message, frozen=True):
    seq: int
    generation: int


class Proposal(Message, frozen=True):
    """Draft tokens below the token at position `base_len`; parents[i] indexes `tokens`, -1 is the root."""

    seq: int
    generation: int
    base_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


class DraftClosed(Message, frozen=True):
    """The draft worker dropped a sequence (or the stream broke: `seq` 0 means all of them)."""

    seq: int
    generation: int
    reason: str


class DraftUp(Message, frozen=True):
    """Decode engine to draft engine, one batch a step. `peer` is the draft front's number for the stream."""

    opens: tuple[DraftOpen, ...] = ()
    commits: tuple[DraftCommit, ...] = ()
    closes: tuple[DraftClose, ...] = ()
    worker: str = ""  # decode side: the draft worker's address
    peer: int = 0  # draft side: which decode engine


class DraftDown(Message, frozen=True):
    """Draft engine to decode engine, one batch a step."""

    proposals: tuple[Proposal, ...] = ()
    closed: tuple[DraftClosed, ...] = ()
    worker: str = ""
    peer: int = 0


class DraftPeerGone(Message, frozen=True):
    """Draft side: the decode engine behind `peer` hung up; its sequences are dropped."""

    peer: int


class Shutdown(Message, frozen=True):
    """Finish nothing more: leave the loop and free everything."""


# --- events ------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """First event: the engine is loaded and warmed up. Describes what it serves."""

    epoch: int
    model: str
    fingerprint: str
    draft_fingerprint: str
    context_length: int
    vocab_size: int
    pages_total: int
    pool: str
    geometry: str  # JSON of kv_transfer.layout.Geometry per group
    meanings: dict[str, str]  # group -> handshake hash
    slowest_step_s: float
    draft_width: int = 0


class Admitted(Message, frozen=True):
    id: str
    attempt: int


class Rejected(Message, frozen=True):
    id: str
    attempt: int
    failure: Failure


class Lost(Message, frozen=True):
    """The pages of this attempt did not arrive; the request keeps its place and waits for `Attach`."""

    id: str
    attempt: int


class Failed(Message, frozen=True):
    id: str
    attempt: int
    failure: Failure
    choice: int | None = None


class Step(Message, frozen=True):
    """One engine step's tokens for all its requests."""

    entries: tuple[Entry, ...]


class PrefillStarted(Message, frozen=True):
    id: str
    attempt: int
    handles: tuple[KvHandle, ...]


class PrefillDone(Message, frozen=True):
    id: str
    attempt: int
    choices: tuple[FirstToken, ...]
    timings: Timings


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


class OpenPull(Message, frozen=True):
    """Please open a Watch on handle.worker and relay it as Pull* commands carrying `pull`."""

    pull: int
    handle: KvHandle
    attempt: int


class ReleasePull(Message, frozen=True):
    """Please call Release on the handle's owner; the answer comes back as `PullReleased`."""

    pull: int


class ClosePull(Message, frozen=True):
    """Please end the Watch of `pull`; nothing more is relayed for it."""

    pull: int


class Load(Message, frozen=True):
    """Sent every loop that changed it and at least every second: progress stamp, load, running totals.

    `pages_used` counts a page once for every sequence or lease that holds it, and not at all in the cache.
    """

    progress: int
    pending: bool
    running: int
    waiting: int
    pages_used: int
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0


class Stopped(Message, frozen=True):
    """The engine left its loop; `failure` says why if it was not asked to."""

    failure: Failure | None = None


Command = (
    Submit
    | Attach
    | Cancel
    | Prefill
    | WatchOpened
    | WatchClosed
    | Release
    | PullReady
    | PullDone
    | PullFailed
    | PullReleased
    | DraftUp
    | DraftDown
    | DraftPeerGone
    | Shutdown
)
Event = (
    Ready
    | Admitted
    | Rejected
    | Lost
    | Failed
    | Step
    | PrefillStarted
    | PrefillDone
    | WatchUpdate
    | Released
    | OpenPull
    | ReleasePull
    | ClosePull
    | DraftUp
    | DraftDown
    | Load
    | Stopped
)
