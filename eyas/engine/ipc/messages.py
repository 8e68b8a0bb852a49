"""What a worker's front and its engine say to each other: one batch of messages each way a step.

Commands go down to the engine, events come up. The engine decides (queues, pages, leases); the front
relays (streams, deadlines of peers, health). Plain msgspec structs: no torch, no gRPC.
"""

from __future__ import annotations

import msgspec

from eyas.common.params import SamplingParams
from eyas.common.types import Entry, FirstToken, GenerationRequest, KvHandle, Timings
from eyas.engine.ipc.message import Failure, Message
from eyas.engine.ipc.transfer_messages import (
    ClosePull,
    CopyPages,
    CopyStopped,
    OpenPull,
    PullDone,
    PullFailed,
    PullMet,
    PullReady,
    PullReleased,
    Release,
    Released,
    ReleasePull,
    StopCopies,
    WatchClosed,
    WatchOpened,
    WatchUpdate,
)

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


class Drain(Message, frozen=True):
    """Accept nothing more; leave once everything accepted has ended and no lease is left."""


class Shutdown(Message, frozen=True):
    """Finish nothing more: leave the loop and free everything."""


# --- events ------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """First event: the engine is loaded and warmed up. Describes what it serves; `synthetic` as in
    `WorkerInfo`.
    """

    epoch: int
    model: str
    fingerprint: str
    draft_fingerprint: str
    context_length: int
    vocab_size: int
    pages_total: int
    pools: dict[str, str]  # group -> path of its pool's file
    geometry: str  # JSON of kv_transfer.layout.Geometry per group
    layout_hashes: dict[str, str]  # group -> handshake hash
    slowest_step_s: float
    draft_width: int = 0
    synthetic: bool = False


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


class Moved(msgspec.Struct, frozen=True):
    """Running totals of the pulls that one backend completed."""

    pulls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, bytes: int, seconds: float) -> Moved:
        return Moved(self.pulls + 1, self.bytes + bytes, self.seconds + seconds)

    def joined(self, other: Moved) -> Moved:
        return Moved(self.pulls + other.pulls, self.bytes + other.bytes, self.seconds + other.seconds)


class Load(Message, frozen=True):
    """Sent every loop that changed it and at least every second: progress stamp, load, running totals.

    `running` and `waiting` count sequences, a request without any yet as one: both are 0 on an idle worker.
    `pages_used` counts the pages that a sequence, a pull or a lease holds, each once, and none for the cache;
    `leases` are the handles that still claim pages here; `moved` is by path; `nodes_verified` counts
    drafts, on all branches of their trees; `drafts_late` counts the rounds of sequences that went on before
    the draft they had asked for; `heard` counts the commands that the engine has carried out.
    `step_seconds` and `step_sequences` count the steps that have landed by the buckets of
    `eyas.common.histogram`, and the totals are the sums of what was counted. `oldest_waiting_s`: how long ago
    the oldest request came on which no work was begun; 0.0 if there is none.
    """

    progress: int
    pending: bool
    running: int
    waiting: int
    pages_used: int
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    leases: int = 0
    moved: dict[str, Moved] = {}
    pulls_failed: int = 0
    nodes_verified: int = 0
    drafts_late: int = 0
    heard: int = 0
    step_seconds: tuple[int, ...] = ()
    step_seconds_total: float = 0.0
    step_sequences: tuple[int, ...] = ()
    step_sequences_total: float = 0.0
    oldest_waiting_s: float = 0.0


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
    | PullMet
    | PullReady
    | PullDone
    | PullFailed
    | PullReleased
    | CopyStopped
    | DraftUp
    | DraftDown
    | DraftPeerGone
    | Drain
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
    | CopyPages
    | StopCopies
    | ReleasePull
    | ClosePull
    | DraftUp
    | DraftDown
    | Load
    | Stopped
)
