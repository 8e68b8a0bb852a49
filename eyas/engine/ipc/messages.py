"""The messages between a worker's front and its engine: one batch each way per step.

Commands go down to the engine, events come up. The engine decides (queues, pages, leases). The front relays
(streams, health, the deadlines of peers); what the engine says of a request (`eyas.common.wire.message`) it
passes on as it is. Plain msgspec structs: no torch, no gRPC.
"""

from __future__ import annotations

import msgspec

from eyas.common.params import SamplingParams
from eyas.common.step_times import StepRates
from eyas.common.types import FAST, FirstToken, GenerationRequest, KvHandle, WeightsInfo, WorkerBacklog
from eyas.common.weights import WeightsCommand, WeightsReply
from eyas.common.wire.control import ControlCommand, ControlOutcome, MemoryTag
from eyas.common.wire.message import (
    PagesLost,
    PrefillDone,
    PrefillStarted,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
    StepReply,
    TaggedMessage,
    WireFailure,
)
from eyas.common.wire.pool import Export, PoolInfo
from eyas.engine.ipc.adapter_messages import (
    AdapterCounts,
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from eyas.engine.ipc.transfer_messages import (
    ClosePull,
    CopyPages,
    CopyRead,
    CopyStaged,
    CopyStopped,
    LeaseReleased,
    LinkProbed,
    OpenPull,
    PagesStaged,
    ProbeLink,
    PullDone,
    PullFailed,
    PullMet,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleaseLease,
    ReleasePull,
    StageCopy,
    StagePages,
    StopCopy,
    UnstagePages,
    WatchClosed,
    WatchOpened,
    WatchUpdate,
)

# --- commands: generation ----------------------------------------------------------------------------


class SubmitGeneration(TaggedMessage, frozen=True):
    """Starts a generation. With `attach`, nothing is computed before `AttachKv`; else it is computed here."""

    request: GenerationRequest
    attempt: int
    attach: bool


class AttachKv(TaggedMessage, frozen=True):
    """The KV of a waiting generation: pull `handles`, or compute the prompt here if there are none.

    `first_tokens` comes only without handles: token 0 of each choice, if it was delivered already.
    """

    id: str
    attempt: int
    handles: tuple[KvHandle, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()


class CancelGeneration(TaggedMessage, frozen=True):
    """Ends one choice, or the request if `choice` is None, in any state. Unknown ids are ignored."""

    id: str
    choice: int | None = None


class PrefillPrompt(TaggedMessage, frozen=True):
    """Computes a prompt's KV, samples token 0 of each choice and offers the pages under leases."""

    request: GenerationRequest
    attempt: int
    offer_draft: bool


# --- drafting: decode engine -> its front -> draft front -> draft engine, and back ----------------------


class DraftOpen(TaggedMessage, frozen=True):
    """A sequence starts drafting. Rows below `base_len` are pulled by `handle`, or do not exist.

    `params` and `choice` key the sampling noise. Its tokens come with its commits. `place`: in the channel's
    mailboxes, by which its rows after the first commit come and its proposals go; -1: all by the fronts.
    `steps`: how deep the chains are that rows there ask for, if the first ones come there too; 0: the first
    commit says it.
    """

    seq: int
    generation: int
    base_len: int
    params: SamplingParams
    choice: int
    handle: KvHandle | None = None
    attempt: int = 0
    place: int = -1
    steps: int = 0


class DraftCommit(TaggedMessage, frozen=True):
    """Certain rows of a sequence, and the request for one proposal after them.

    Row j is (feature of position base_len + j, token base_len + j + 1). `features`: float32 little-endian,
    [len(tokens), head width]. `steps`, `topk`, `draft_tokens`: the shape of the proposal. `place`: where its
    features are in this worker's ring of rows, and `features` is empty; -1: they are here. `lent`: by which
    number they came beside this, and `features` is empty (`eyas.engine.ipc.lending`); 0: they are here.
    """

    seq: int
    generation: int
    base_len: int
    tokens: tuple[int, ...]
    features: bytes
    steps: int
    topk: int = 1
    draft_tokens: int = 0
    place: int = -1
    lent: int = 0


class DraftClose(TaggedMessage, frozen=True):
    """The decode engine needs no more drafts for a sequence."""

    seq: int
    generation: int


class DraftProposal(TaggedMessage, frozen=True):
    """Draft tokens below the token at position `base_len`. parents[i] is an index; -1: the root."""

    seq: int
    generation: int
    base_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


class DraftClosed(TaggedMessage, frozen=True):
    """The draft worker dropped a sequence. `seq` 0: all of them, because the stream broke."""

    seq: int
    generation: int
    reason: str


class DraftChannel(msgspec.Struct, frozen=True):
    """A way past the fronts that a decode engine offers: where it listens, and what is to be in the memory.

    That is a mailbox for each of `places` sequences, with `rows` rows, whose features have `width` values,
    and a proposal of up to `nodes` nodes. `gpu`: the one that would write the features, of `dtype`, into the
    draft worker's GPU instead; empty: none would.
    """

    export: Export
    width: int
    nodes: int
    places: int
    rows: int
    gpu: bytes = b""
    dtype: str = ""


class DraftUp(TaggedMessage, frozen=True):
    """Decode engine to draft engine, one batch per step."""

    opens: tuple[DraftOpen, ...] = ()
    commits: tuple[DraftCommit, ...] = ()
    closes: tuple[DraftClose, ...] = ()
    channel: DraftChannel | None = None
    worker: str = ""  # on the decode side: the draft worker's address
    peer: int = 0  # on the draft side: the front's number for the decode engine's stream


class DraftDown(TaggedMessage, frozen=True):
    """Draft engine to decode engine, one batch per step. An empty one says that the worker is connected.

    `no_channel`: why it does not take the channel that was offered; empty: nothing is said of that.
    """

    proposals: tuple[DraftProposal, ...] = ()
    closed: tuple[DraftClosed, ...] = ()
    no_channel: str = ""
    worker: str = ""  # as in `DraftUp`
    peer: int = 0


class DraftPeerGone(TaggedMessage, frozen=True):
    """The decode engine behind `peer` hung up; a message on the draft side. Its sequences are dropped."""

    peer: int


class FlushCache(TaggedMessage, frozen=True):
    """Empties the prefix cache once nothing runs, within `wait_s`. The answer is one `CacheFlushed`."""

    call: int
    wait_s: float


class ControlEngine(TaggedMessage, frozen=True):
    """A command of an operator, carried out between two steps. The answer is one `EngineControlled`."""

    call: int
    command: ControlCommand


class WeightsCall(TaggedMessage, frozen=True):
    """A command from a worker's front to its engine. The answer is one `WeightsAnswer`."""

    call: int
    command: WeightsCommand


class DrainEngine(TaggedMessage, frozen=True):
    """Accept nothing more; leave once all accepted requests have ended and no lease is left."""


class ShutdownEngine(TaggedMessage, frozen=True):
    """Leave the loop at once and free everything."""


# --- events ------------------------------------------------------------------------------------------


class EngineReady(TaggedMessage, frozen=True):
    """The first event: the engine is loaded and warmed up. It describes what the engine serves.

    `fingerprint` and `draft_fingerprint` identify model and head. `slowest_step_s`: seconds, measured during
    the warm-up. `draft_width`: values per feature of the head (0: no head). `synthetic`, `rates` and
    `arithmetic` as in `WorkerInfo`.
    """

    epoch: int
    model: str
    fingerprint: str
    draft_fingerprint: str
    context_length: int
    vocab_size: int
    pages_total: int
    pools: dict[str, PoolInfo]  # KV kind -> the description that pullers of its pages get
    files: dict[str, str]  # KV kind -> path of the file that its pages are in, for this worker's front alone
    slowest_step_s: float
    draft_width: int = 0
    synthetic: bool = False
    rates: StepRates | None = None
    arithmetic: str = FAST
    tokenizer: str = ""  # as in `WorkerInfo`
    staged: bool = False  # those files are staging: pages pass through them


class TransferTotals(msgspec.Struct, frozen=True):
    """Running totals of the pulls that one transfer path completed; `seconds` is their summed duration."""

    pulls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, bytes: int, seconds: float) -> TransferTotals:
        """The totals after one more pull."""
        return TransferTotals(self.pulls + 1, self.bytes + bytes, self.seconds + seconds)

    def joined(self, other: TransferTotals) -> TransferTotals:
        """The sum of both."""
        return TransferTotals(
            self.pulls + other.pulls, self.bytes + other.bytes, self.seconds + other.seconds
        )


class HostCache(msgspec.Struct, frozen=True, array_like=True):
    """The host tier: `pages` that it holds, prompt tokens loaded from it, bytes copied to it and back.

    Of the stores behind it: prompt tokens that came from there, looks that ended at a page that was not
    there, bytes written and read, calls that failed, and prompts that were computed because that was faster;
    and `trouble`, what is wrong with them now.
    """

    pages: int = 0
    tokens: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    store_tokens: int = 0
    store_misses: int = 0
    store_bytes_out: int = 0
    store_bytes_in: int = 0
    store_failures: int = 0
    store_slow: int = 0
    trouble: str = ""


class StateCache(msgspec.Struct, frozen=True, array_like=True):
    """Slots of states: `used` by sequences, pulls and leases, and the states `kept` for others.

    Running totals: sequences that resumed from one (`hits`), the prompt tokens that they did not compute, and
    those whose KV pages were cached and which were computed, as no state was kept there (`missed`).
    """

    slots: int = 0
    used: int = 0
    kept: int = 0
    hits: int = 0
    tokens: int = 0
    missed: int = 0


class EngineLoad(TaggedMessage, frozen=True, tag="Load"):
    """Progress, load and running totals. Sent after every loop that changed the load, and every 0.5 s.

    `running` and `waiting` count sequences; a request without sequences counts as one. Both are 0 on an idle
    worker. `pages_used` counts each page that a sequence, a pull or a lease holds once; pages that only the
    cache keeps are not counted. `step_seconds` and `step_sequences` count the landed steps by the buckets of
    `eyas.common.histogram`; their totals are the sums of the counted values.
    """

    progress: int  # grows with every loop
    pending: bool  # whether there is work
    running: int
    waiting: int
    pages_used: int
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    logits_not_finite: int = 0  # requests that failed for them
    leases: int = 0  # handles that still claim pages here
    moved: dict[str, TransferTotals] = {}  # by transfer path
    ways_refused: dict[str, int] = {}  # by transfer path: its proofs and copies that failed
    pulls_failed: int = 0
    nodes_verified: int = 0  # drafts on all branches of their trees
    drafts_late: int = 0  # rounds that did not wait for the draft that they had asked for
    drafts_sent: dict[str, int] = {}  # commits to draft workers, by path; "dropped": by none
    heard: int = 0  # commands that the engine has carried out
    step_seconds: tuple[int, ...] = ()
    step_seconds_total: float = 0.0
    step_sequences: tuple[int, ...] = ()
    step_sequences_total: float = 0.0
    oldest_waiting_s: float = 0.0  # age of the oldest request that has not begun; 0.0: none waits
    backlog: WorkerBacklog = WorkerBacklog()  # for routers; counted at least every 0.1 s
    host: HostCache = HostCache()
    states: StateCache = StateCache()
    paused: bool = False  # no step runs
    released: tuple[MemoryTag, ...] = ()  # memory that it has let go of
    adapters: AdapterCounts = AdapterCounts()
    weights: WeightsInfo = WeightsInfo()


class EngineAlive(TaggedMessage, frozen=True, tag="Alive"):
    """The engine is at work within a loop that takes long. Sent at most twice a second."""


class CacheUpdate(TaggedMessage, frozen=True, tag="Cached"):
    """Pages that the prefix cache got and lost since the last one, by name (`eyas.common.page_names`).

    Those that it lost go first. `before`, `tokens`, `salts`: of each page that it got the name of the page
    before it, its tokens, and of a first page its salt, where an engine is asked to say so
    (`EngineConfig.kv_events`; `PrefixCache.origins`). `host_added`, `host_dropped`: of pages in the host's
    memory.
    """

    page_size: int
    lookahead: int
    added: bytes
    dropped: bytes
    before: bytes = b""
    tokens: bytes = b""
    salts: bytes = b""
    host_added: bytes = b""
    host_dropped: bytes = b""


class CacheFlushed(TaggedMessage, frozen=True):
    """The answer to `FlushCache`: the pages that the cache had; after a failure it is as it was."""

    call: int
    pages: int = 0
    failure: WireFailure | None = None


class EngineControlled(TaggedMessage, frozen=True):
    """The answer to `ControlEngine`; after a failure nothing has changed, unless it says so."""

    call: int
    outcome: ControlOutcome = ControlOutcome()
    failure: WireFailure | None = None


class WeightsAnswer(TaggedMessage, frozen=True):
    """The answer to a `WeightsCall`."""

    call: int
    reply: WeightsReply


class EngineStopped(TaggedMessage, frozen=True):
    """The engine left its loop. `failure` says why, unless it was asked to."""

    failure: WireFailure | None = None


Command = (
    SubmitGeneration
    | AttachKv
    | CancelGeneration
    | PrefillPrompt
    | WatchOpened
    | WatchClosed
    | ReleaseLease
    | StagePages
    | UnstagePages
    | PullMet
    | PullReady
    | PullDone
    | PullFailed
    | PullReleased
    | CopyStaged
    | CopyStopped
    | ProbeLink
    | DraftUp
    | DraftDown
    | DraftPeerGone
    | FlushCache
    | LoadAdapter
    | UnloadAdapter
    | ControlEngine
    | WeightsCall
    | DrainEngine
    | ShutdownEngine
)
Event = (
    EngineReady
    | RequestAdmitted
    | RequestRejected
    | PagesLost
    | RequestFailed
    | StepReply
    | PrefillStarted
    | PrefillDone
    | WatchUpdate
    | LeaseReleased
    | PagesStaged
    | OpenPull
    | CopyPages
    | StageCopy
    | CopyRead
    | LinkProbed
    | StopCopy
    | ReleaseHandle
    | ReleasePull
    | ClosePull
    | DraftUp
    | DraftDown
    | EngineLoad
    | EngineAlive
    | CacheUpdate
    | CacheFlushed
    | AdapterLoaded
    | AdapterUnloaded
    | EngineControlled
    | WeightsAnswer
    | EngineStopped
)
