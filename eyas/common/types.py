"""The values that every service shares: requests, tokens, KV handles, descriptions of workers.

Plain msgspec structs, cheap to send between processes. They hold no protobuf (see `convert`), no tensors and
no text.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from eyas.common.params import SamplingParams
from eyas.common.step_times import UNSEEN, StepPace, StepRates


class Role(enum.StrEnum):
    """The kind of work that the router may send to a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"


FAST, EXACT = "fast", "exact"
"""The arithmetics of an engine: does a request's answer follow it alone but for near-ties, or to the bit?

Names of the second kind begin with EXACT; engines whose names are equal compute the same bits.
"""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: low-rank updates of the model's weights, by which some requests are computed.

    `id`: 16 hex digits of a digest of its configuration and its tensors: folders with the same content are
    one adapter. `name`: callers choose it by that, as a model. `path`: its folder, on each worker's machine.
    `pinned`: it never leaves the device for another.
    """

    name: str
    path: str
    id: str = ""
    rank: int = 0
    pinned: bool = False


class AdapterRoster(msgspec.Struct, frozen=True):
    """The adapters that every worker of a cluster has loaded, or is to load.

    `revision`: grows with each change; of several workers' rosters the one with the greatest counts.
    """

    revision: int = 0
    adapters: tuple[Adapter, ...] = ()

    def named(self, name: str) -> Adapter | None:
        """The adapter of this name, if there is one."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def name_of(self, id: str) -> str:
        """The first name of the adapter with this id; of one that has just left, the id."""
        return next((adapter.name for adapter in self.adapters if adapter.id == id), id)

    @property
    def ids(self) -> set[str]:
        """The ids of all of them."""
        return {adapter.id for adapter in self.adapters}

    @property
    def content(self) -> frozenset[tuple[str, str, bool]]:
        """All that matters of the adapters: the same folder may have other paths on other machines."""
        return frozenset((adapter.name, adapter.id, adapter.pinned) for adapter in self.adapters)


class RequestChoice(msgspec.Struct, frozen=True):
    """One of a request's n continuations; `output_ids` are the tokens it already has."""

    index: int
    output_ids: tuple[int, ...] = ()


class RequestDraftLimits(msgspec.Struct, frozen=True):
    """How far a request's drafts reach at most, as `SpeculationConfig` counts; 0: as far as the server's."""

    steps: int = 0
    topk: int = 0
    draft_tokens: int = 0

    @property
    def deepest(self) -> int:
        """The most drafts of a round that can be accepted; 0: that is for the server to say."""
        return min((most for most in (self.steps, self.draft_tokens - 1) if most > 0), default=0)


if TYPE_CHECKING:
    PromptIds = Sequence[int]
else:
    PromptIds = tuple[int, ...]  # as engines read it
"""Token ids of a prompt; in a gateway, many of them are an array of C integers."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """All that determines a generation: positions and penalties follow from the ids.

    `choices` lists unfinished choices only. `timeout_s`: seconds left until the caller's deadline. A worker
    is shared fairly between `caller`s (names of API keys), then between `call`s (an id that all prompts of
    one HTTP or gRPC call have). `begun`: its client has a token already, so it is never refused for load.
    `predicted`: what the caller expects the answer to be, which is drafted from and changes no token.
    `priority`: lower is earlier, see `eyas.common.params`. `salt`: of the names of its pages, which it shares
    with requests of the same salt alone (`eyas.common.page_names.salt_of`). `adapter`: the id of the one that
    computes it (see `Adapter`); "": the base model. `weights`: the digest of those that compute it
    (`eyas.common.weights`); "": those of the workers' start. `session`: its conversation's name, or ""; for
    routers, so it does not travel. `request_id` and `traceparent`: of the call, for logs (see
    `eyas.common.logging`).
    """

    id: str
    prompt_ids: PromptIds
    params: SamplingParams
    choices: tuple[RequestChoice, ...] = (RequestChoice(0),)
    timeout_s: float = 600.0
    speculative: bool = True
    draft_limits: RequestDraftLimits = RequestDraftLimits()
    caller: str = ""
    call: str = ""  # "": a call of its own
    begun: bool = False
    predicted: tuple[int, ...] = ()
    priority: int = 0
    salt: bytes = b""
    adapter: str = ""
    weights: str = ""
    session: str = ""
    request_id: str = ""
    traceparent: str = ""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one emitted token by the bare model (natural, before penalties and filters).

    `top`: (id, log-probability) of the best ids at its position, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptTokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities by the bare model of N consecutive prompt tokens, each given all before it.

    `logprobs`: float32 [N]; `best_ids` int32 and `best` float32 [N, top]: the most probable ids per position,
    best first. `experts` int16 [N, layers, most experts of a row], if asked for: those that the row before
    each token took (-1: none). All are little-endian and packed: prompts are long, and only a front reads
    them.
    """

    top: int = 0
    logprobs: bytes = b""
    best_ids: bytes = b""
    best: bytes = b""
    experts: bytes = b""

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def joined(self, following: PromptTokenLogprobs, known: int) -> PromptTokenLogprobs:
        """Joins these rows and `following` without its first `known` rows, which these have already."""
        own, each = 4 * known, 4 * known * following.top
        return PromptTokenLogprobs(
            following.top,  # no more than there are ids
            self.logprobs + following.logprobs[own:],
            self.best_ids + following.best_ids[each:],
            self.best + following.best[each:],
            self.experts + following.experts[known * (len(following.experts) // max(len(following), 1)) :],
        )

    def columns(self) -> tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]:
        """`logprobs`, `best_ids` and `best`, unpacked."""
        rows, top = len(self), self.top
        return (
            struct.unpack(f"<{rows}f", self.logprobs),
            struct.unpack(f"<{rows * top}i", self.best_ids),
            struct.unpack(f"<{rows * top}f", self.best),
        )

    def rows(self) -> list[TokenLogprob]:
        """Unpacked, one per token."""
        own, ids, values = self.columns()
        best, top = list(zip(ids, values, strict=True)), self.top
        return [TokenLogprob(p, tuple(best[i * top : (i + 1) * top])) for i, p in enumerate(own)]


class FinishCause(enum.StrEnum):
    """Why a choice ended. Stop strings are the gateway's, and count as `STOP`."""

    STOP = "stop"  # end-of-turn or a stop token
    LENGTH = "length"
    ABORT = "abort"  # an operator ended it: what it has is a part of the answer


class EngineTimings(msgspec.Struct, frozen=True):
    """The stages of one request on one worker, and the pages that were moved for it.

    The gateway fills in `worker`, the `role` that it had for the request, and when the request was `sent`
    there (monotonic seconds); workers leave them empty.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_path: str = ""
    cached_tokens: int = 0
    worker: str = ""
    role: Role | None = None
    sent: float = 0.0


class TokenEntry(msgspec.Struct, frozen=True, gc=False):
    """Tokens that one engine step gave one choice. `index` is the output index of tokens[0].

    The step verified drafts `offered` tokens deep and kept `accepted` of them (both 0 without drafts); of a
    tree, the longest branch counts. `prompt`: the prompt's log-probabilities if asked for, on the request's
    first entry.
    """

    id: str
    attempt: int
    choice: int
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishCause | None = None
    accepted: int = 0
    offered: int = 0
    timings: EngineTimings | None = None
    prompt: PromptTokenLogprobs | None = None


class FirstToken(msgspec.Struct, frozen=True):
    """Token 0 of one choice, from the worker that computed the prompt. With `max_tokens` 0 it is not shown.

    `prompt`: the prompt's log-probabilities if asked for, on the first choice only.
    """

    choice: int
    token: int
    logprob: TokenLogprob | None = None
    finish: FinishCause | None = None
    prompt: PromptTokenLogprobs | None = None


class KvKind(enum.StrEnum):
    """The owner of KV: the target model or the draft head."""

    TARGET = "target"
    DRAFT = "draft"


class RankPages(msgspec.Struct, frozen=True):
    """The pages of a handle on one rank, by their numbers in its pool."""

    rank: int
    pages: tuple[int, ...]


class PageShare(msgspec.Struct, frozen=True):
    """The part of every page of a rank that travels: `heads` of its heads, from `first` on; 0: all of the
    page.

    `on_device`: through slots in the memory of the rank's device, not the host's.
    """

    rank: int = 0
    first: int = 0
    heads: int = 0
    on_device: bool = False


ALL_OF_RANK_0 = PageShare()


class KvHandle(msgspec.Struct, frozen=True):
    """A leased claim on KV pages of another worker: metadata only, never bytes.

    `worker`: the owner's address. `epoch`: which of its pools, so that stale handles are recognised.
    `layout`: the layout hash that both sides must share. `tokens`: how many rows are, or will be, valid.
    """

    worker: str
    epoch: int
    attention_rank: int
    id: int
    group: KvKind
    layout: str
    tokens: int
    shards: tuple[RankPages, ...]


class WorkerBacklog(msgspec.Struct, frozen=True):
    """The work of a worker, and its room for more.

    `decoding`: sequences that decode there, or will once their prompts are computed; `context`: their tokens.
    `queued`: prompt tokens that are still to be computed there. `prompt_share`: the part of its last seconds
    that went to steps with prompts. `prefill_room`, `decode_room`: requests that its queue still takes.
    `pace`: how long its steps took lately, over what its rates say; 0.0 for a kind that it has not seen.
    `kv_room`: tokens whose KV still fits there, beside what it has and waits for; None: it is not known.
    """

    decoding: int = 0
    context: int = 0
    queued: int = 0
    prompt_share: float = 0.0
    prefill_room: int = 0
    decode_room: int = 0
    pace: StepPace = UNSEEN
    kv_room: int | None = None


FIRST_VERSION = "default"
"""The name of the weights that a worker starts with."""


class WeightsInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The weights that a worker serves. `version`: their name. `generation`: how many updates came before, by
    which old ones are known. `digest`: of their content; "": those of its start. `folder`: where they were
    read, if others can read them there. `closed`: it waits for new ones, and takes no request.
    `seconds`: how long no step could run for the last update.
    """

    version: str = FIRST_VERSION
    generation: int = 0
    digest: str = ""
    folder: str = ""
    closed: bool = False
    seconds: float = 0.0


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's description of itself, for routers. `worker` is its address.

    `synthetic`: it accepts drafts by chance, for benchmarks, and its answers mean nothing. `starting`: its
    engine still loads, so only its address and roles are known. `stalled`: its engine makes no progress, so
    it takes nothing new, and serves again if the engine goes on. `stays`: no KV page leaves it or comes.
    `rates`: None if they are not known. `arithmetic`: "exact" if a request's tokens follow it alone, to the
    bit, else "fast"; "exact_tp2" where two GPUs share the model, whose bits are others. `tokenizer`: a hash
    of its tokenizer's file, by which it follows grammars; "": it has none. `trouble`: what it does without,
    as sentences; "": nothing. `paused`: no step runs there, and requests wait. `released`: memory that it has
    let go of (`eyas.common.wire.control.MemoryTag`). `adapters`: those that it computes by; None: it can load
    none. `adapter_slots`: the ids of those on its device now. `weights`: those that it serves.
    """

    worker: str
    roles: tuple[Role, ...]
    epoch: int
    model: str
    fingerprint: str
    draft_fingerprint: str
    context_length: int
    vocab_size: int
    pages_total: int
    pages_used: int = 0
    running: int = 0
    waiting: int = 0
    serving: bool = True
    synthetic: bool = False
    starting: bool = False
    stalled: bool = False
    stays: bool = False
    backlog: WorkerBacklog = WorkerBacklog()
    rates: StepRates | None = None
    arithmetic: str = FAST
    tokenizer: str = ""
    trouble: str = ""
    paused: bool = False
    released: tuple[str, ...] = ()
    adapters: AdapterRoster | None = None
    adapter_slots: tuple[str, ...] = ()
    weights: WeightsInfo = WeightsInfo()

    @property
    def runs_target(self) -> bool:
        """Whether it runs the target model: it computes prompts, or decodes."""
        return Role.PREFILL in self.roles or Role.DECODE in self.roles
