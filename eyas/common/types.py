"""The nouns that every tier shares: requests, emitted tokens, KV handles, worker descriptions.

Plain values (msgspec structs), cheap to send between processes. They know neither protobuf (see
`convert`), nor tensors, nor text.
"""

from __future__ import annotations

import enum
import struct

import msgspec

from eyas.common.params import SamplingParams


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"


class Choice(msgspec.Struct, frozen=True):
    """One of a request's n continuations; `output_ids` are the tokens it already has."""

    index: int
    output_ids: tuple[int, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True):
    """Everything that determines a generation: position, penalties and grammar state derive from the ids.

    `choices` lists unfinished choices only. `timeout_s` is what is left of the caller's deadline. `caller`
    (the name of its API key) and `call` (an id that all prompts of one HTTP or gRPC call share) name whose
    share of a worker it takes. `begun`: its client has a token already, so it is never refused for load.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    choices: tuple[Choice, ...] = (Choice(0),)
    timeout_s: float = 600.0
    speculative: bool = True
    caller: str = ""
    call: str = ""  # "": a call of its own
    begun: bool = False


class TokenLogprob(msgspec.Struct, frozen=True):
    """Raw-model log-probability of one emitted token, and of the best ids at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Raw-model log-probabilities of consecutive prompt tokens, each given all before it.

    `logprobs`: float32 [N]; `best_ids` int32 and `best` float32 [N, top]: the most probable ids in each
    place, best first. All little-endian and packed: prompts are long, and only a front looks inside.
    """

    top: int = 0
    logprobs: bytes = b""
    best_ids: bytes = b""
    best: bytes = b""

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def joined(self, following: PromptLogprobs, known: int) -> PromptLogprobs:
        """These rows, then `following` without its first `known` rows, which are here already."""
        own, each = 4 * known, 4 * known * following.top
        return PromptLogprobs(
            following.top,  # no more than there are ids
            self.logprobs + following.logprobs[own:],
            self.best_ids + following.best_ids[each:],
            self.best + following.best[each:],
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


class Finish(enum.StrEnum):
    STOP = "stop"  # end-of-turn or a stop token
    LENGTH = "length"


class Timings(msgspec.Struct, frozen=True):
    """Where one request's time went on one worker, in milliseconds, and what was moved for it.

    Workers do not name themselves: the gateway fills in `worker` and the `role` it had for the request.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_path: str = ""
    cached_tokens: int = 0
    worker: str = ""
    role: Role | None = None


class Entry(msgspec.Struct, frozen=True):
    """Tokens that one engine step gave one choice. `index` is the output index of tokens[0].

    Drafts `offered` tokens deep were verified by the step, and `accepted` of them kept (both 0 for a plain
    row): a chain's drafts, or those on the longest branch of a tree. `prompt`: what was asked of the prompt,
    on the first entry of the request.
    """

    id: str
    attempt: int
    choice: int
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    accepted: int = 0
    offered: int = 0
    timings: Timings | None = None
    prompt: PromptLogprobs | None = None


class FirstToken(msgspec.Struct, frozen=True):
    """Token 0 of one choice, sampled by the worker that ran the prompt; not to be told if `max_tokens` is 0.

    `prompt`: what was asked of the prompt, on the first choice only.
    """

    choice: int
    token: int
    logprob: TokenLogprob | None = None
    finish: Finish | None = None
    prompt: PromptLogprobs | None = None


class KvKind(enum.StrEnum):
    TARGET = "target"
    DRAFT = "draft"


class Shard(msgspec.Struct, frozen=True):
    """The pages of a handle that one rank holds. `pool` is a path under /dev/shm for host-mapped pools."""

    rank: int
    pool: str
    pages: tuple[int, ...]


class KvHandle(msgspec.Struct, frozen=True):
    """A leased claim on KV pages of another worker: metadata only, never bytes.

    `worker` is the owner's address; `epoch` names the incarnation of its pool, so that anything stale
    is recognised; `layout` is the handshake hash of meaning; `tokens` rows are (or will be) valid.
    """

    worker: str
    epoch: int
    attention_rank: int
    id: int
    group: KvKind
    layout: str
    tokens: int
    shards: tuple[Shard, ...]


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a worker says of itself to routers. `worker` is its address; load is read off Sessions too.

    `synthetic`: it accepts drafts by chance, for benchmarks, and what it answers means nothing. `starting`:
    its engine still loads, so nothing but its address and roles is known yet.
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
