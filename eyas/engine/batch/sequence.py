"""The engine's nouns: a generation (one accepted request) and its sequences (one per choice).

The whole state of a sequence derives from its prompt, its output, and how many of their rows have KV. So a
preempted or migrated sequence cannot be told from one that was never disturbed. No torch here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from eyas.common.params import PRIORITY_S
from eyas.common.types import EngineTimings, GenerationRequest, KvHandle, PromptIds, PromptTokenLogprobs
from eyas.engine.batch.page_table import PageTable
from eyas.engine.batch.prompt_scores import PromptScores, ScoreRequest
from eyas.engine.batch.tree import DraftTree
from eyas.engine.batch.window import FIRST_ROWS, FeatureWindow
from eyas.engine.states.shape import SPAN


class GenerationKind(enum.Enum):
    """The division of a generation between workers: where its KV is computed, and where it is decoded."""

    LOCAL = "local"  # computed and decoded here
    ATTACH = "attach"  # KV comes from a prefill worker
    PREFILL = "prefill"  # computed here, decoded elsewhere


@dataclass(eq=False)
class Generation:
    """An accepted request. Times are monotonic seconds."""

    request: GenerationRequest
    attempt: int
    kind: GenerationKind
    arrived: float
    deadline: float
    sequences: list[Sequence] = field(default_factory=list)
    rank: int | None = None  # the attention rank whose pages and slots it takes; None: not chosen yet
    attached: int = -1  # ATTACH: the newest attempt for which an `AttachKv` arrived
    began: float = 0.0  # when its first chunk ran or its pull began; 0.0: not yet
    cached_tokens: int = 0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_path: str = ""
    timings_sent: bool = False
    offer_draft: bool = False  # PREFILL: offer draft KV as well
    draft_handle: KvHandle | None = None  # ATTACH: the handle of the draft KV, for a drafter
    draft_claimed: bool = False  # a drafter has that handle now, and must release it
    scores: PromptScores | None = None  # the prompt's scores, until they are sent
    share: tuple[str, str] = field(init=False)  # (caller, call): sequences of one share count together
    place: float = field(init=False)  # in the queue: its arrival, moved by its priority

    def __post_init__(self) -> None:
        self.share = self.request.caller, self.request.call or self.request.id
        self.place = self.arrived + PRIORITY_S * self.request.priority

    @property
    def id(self) -> str:
        """The request's id inside the engine."""
        return self.request.id

    def scored(self, request: ScoreRequest, logprobs: PromptTokenLogprobs) -> None:
        """Adds scores. Ignored after they were sent: then their sequence was preempted and ran again."""
        if self.scores is not None:
            self.scores.add(request, logprobs)

    def prompt_once(self) -> PromptTokenLogprobs | None:
        """The prompt's scores, the first time; None after that, or if none were asked for."""
        scores, self.scores = self.scores, None
        return None if scores is None else scores.logprobs

    @property
    def has_started(self) -> bool:
        """True if work was spent on it here, or its client has a token from another worker."""
        return self.began > 0.0 or self.request.begun

    def timings_once(self, now: float) -> EngineTimings | None:
        """The timings up to the first token, the first time this is called; None after that."""
        if self.timings_sent:
            return None
        self.timings_sent = True
        began = self.began or now
        return EngineTimings(
            queue_ms=1e3 * (began - self.arrived),
            prefill_ms=0.0 if self.kind is GenerationKind.ATTACH else 1e3 * (now - began),
            transfer_ms=self.transfer_ms,
            transfer_bytes=self.transfer_bytes,
            transfer_path=self.transfer_path,
            cached_tokens=self.cached_tokens,
        )


class RingPlace(NamedTuple):
    """A sequence's place in a drafter's ring of features on its GPU: number and address, valid while the
    drafter knows the sequence by `generation`.

    `mailbox`: the address of its place in the drafter's mailbox; 0: the host sends rounds, and receives
    drafts.
    """

    number: int
    address: int
    generation: int
    mailbox: int = 0


@dataclass(frozen=True, eq=False)
class Continuation:
    """`tokens` that may follow the first `base` ids of a sequence, as other texts did that had the last
    `match` of these.
    """

    base: int
    match: int
    tokens: tuple[int, ...]


@dataclass(eq=False)
class Sequence:
    """A choice that is being generated.

    `kv_len` rows of its tokens have KV; while it decodes these are all but the last token.
    """

    uid: int
    generation: Generation
    choice: int
    prompt: PromptIds
    output: list[int]
    forks: tuple[int, ...] = ()  # choices that will fork from this one's prompt
    reserved: int = 0  # slots reserved for the forks at admission
    tables: list[PageTable] = field(default_factory=list)  # of each group of layers; none: it has no pages
    kv_len: int = 0
    draft_len: int = 0  # rows that have draft KV in this pool
    state: int = -1  # its slot of states; -1: none
    bound: int = 0  # where its state stands, once all launched steps have landed
    branch: int = 0  # where other texts leave its prompt: a state is kept there
    tree: DraftTree | None = None  # the drafts that the next step may verify
    continuation: Continuation | None = None  # what the lookup reads beside its own text
    fetched: bool = False  # its pages were asked of the host, since it last had any
    sought: bool = False  # .. and of the stores behind it
    drafting: bool = False  # a drafter follows this sequence
    ring: RingPlace | None = None  # where the device puts its features for that drafter too
    answered: bool = False  # that drafter has left drafts for it, so rounds may count on it
    window: FeatureWindow = field(default_factory=FeatureWindow)  # for a drafter that must start (again)
    slot: int = -1  # its place in the running batch; -1: none
    adapter_slot: int = 0  # that of its adapter on the device; 0: none
    occupancy: int = -1  # a number that is new each time that a sequence takes a slot
    in_flight: int = 0  # launched steps whose tokens are not yet in `output`
    ahead: int = 0  # missing tokens of long prompts when it came, if its own is long

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def salt(self) -> bytes:
        """Its pages are shared with those of this salt alone."""
        return self.generation.request.salt

    @property
    def adapter(self) -> str:
        """The id of its adapter; "": it has none."""
        return self.generation.request.adapter

    @property
    def pages(self) -> list[int]:
        """Its pages in the first group of layers, by position."""
        return self.tables[0].pages if self.tables else []

    @pages.setter
    def pages(self, pages: list[int]) -> None:
        self.tables = [PageTable(pages)] if pages else []

    @property
    def missing(self) -> int:
        """Rows to compute before the next token can be sampled; 1 while it decodes.

        0 while a step that gives its next token is in flight.
        """
        return len(self) - self.kv_len

    @property
    def mailed(self) -> bool:
        """True if the device itself sends its rounds to a drafter far away, and takes its drafts."""
        return self.ring is not None and self.ring.mailbox != 0

    @property
    def in_prompt(self) -> bool:
        """True if its next rows are a chunk.

        The last row of a prompt of its own is a round like any other.
        """
        return self.missing > (0 if self.is_shared else 1)

    @property
    def is_shared(self) -> bool:
        """True if others start from its prompt: choices here, or another worker."""
        return bool(self.forks) or self.generation.kind is GenerationKind.PREFILL

    @property
    def keeps(self) -> int:
        """Slots that are reserved for its forks while it runs."""
        return min(self.reserved, len(self.forks))

    @property
    def next_forks(self) -> tuple[int, ...]:
        """Choices that get their first token from its next step: none if a step in flight gives it."""
        return () if self.in_flight else self.forks

    @property
    def special(self) -> bool:
        """True if its next token needs more than temperature and filters: processors, logprobs, forks."""
        params = self.generation.request.params
        return bool(self.next_forks) or params.reads_history or len(self.output) < params.min_tokens

    @property
    def masked_alone(self) -> bool:
        """True if its next token needs the masks of a grammar, and else only temperature and filters."""
        params = self.generation.request.params
        return params.grammar is not None and not self.next_forks and not params.reads_more_than_grammar

    def grow(self, rows: int, *, drafted: bool) -> None:
        """The next `rows` rows have KV; draft KV too, if that was `drafted` and no earlier row lacks it."""
        whole = drafted and self.draft_len >= self.kv_len
        self.kv_len += rows
        if whole:
            self.draft_len = self.kv_len

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids at positions start .. stop - 1."""
        n = len(self.prompt)
        return [*self.prompt[start:stop], *self.output[max(start - n, 0) : max(stop - n, 0)]]

    def all_tokens(self) -> SequenceOf[int]:
        """All ids, those of the prompt first."""
        return self.tokens(0, len(self))


@dataclass(frozen=True)
class SequenceWork:
    """The work of one step for one sequence: it computes rows start .. start + len(tokens) - 1.

    A prompt chunk has no tree; `sample` says that its last row gives a token. A round (plain decoding or
    verification) has the sequence's last token, followed by the nodes of `tree`, and samples at every node.
    Where the device keeps the drafts, `tokens` holds the root only, which is stale while a step is in
    flight. `occupancy`: the sequence's when this was composed; once it has another, these rows are gone.
    """

    seq: Sequence
    start: int
    tokens: list[int]
    tree: DraftTree | None
    sample: bool
    round: bool = False
    occupancy: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "occupancy", self.seq.occupancy)

    @property
    def fold(self) -> int:
        """The position at which the sequence's state stands behind it: rows of chunks are certain, drafts are
        not.
        """
        certain = self.start + (0 if self.round else len(self.tokens))
        return certain // SPAN * SPAN

    @property
    def mailed_rows(self) -> int:
        """The rows at the end of a prompt with which a drafter far away begins, where the device itself sends
        them; else 0. Others that start from the prompt need its last one on the host.
        """
        begins = self.sample and not self.round and self.seq.mailed and not self.seq.is_shared
        return min(len(self.tokens), FIRST_ROWS) if begins else 0

    @property
    def followed(self) -> bool:
        """True if a draft head inside the step follows it; False where its request turned drafting off."""
        return not self.round or self.seq.generation.request.speculative

    def waits(self, depth: int | None) -> bool:
        """True for a round of a step in which the head does not draft, but might: it takes the row later."""
        return self.round and depth is not None and depth <= 0

    def score_request(self, first: int = 0) -> ScoreRequest | None:
        """The rows of it that must be scored, if `first` is the place of its first row in the forward."""
        scores = self.seq.generation.scores
        return (
            None
            if scores is None
            else scores.score_request(self.start, range(first, first + len(self.tokens)))
        )
