"""Drafting inside the step: the head runs over the rows a round has accepted, then proposes into the tables.

The plain twin is `eyas.engine.speculation.draft_worker.draft_runner`, driven by
`eyas.engine.speculation.drafters.colocated`. Everything is launched blindly: which rows were accepted is
known on the device alone. Draft KV lies in a pool of its own under the target's page numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, cast

import torch

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.tables import SlotTables
from eyas.engine.checkpoint.config import DraftBlock
from eyas.engine.kernels.drafts import accepted_path, chains, trees
from eyas.engine.kernels.drafts import block as block_rows
from eyas.engine.kernels.drafts import rounds as round_kernels
from eyas.engine.kernels.launch.side import SideStream
from eyas.engine.kernels.products.rows import gather_rows
from eyas.engine.kernels.products.skinny import MAX_ROWS
from eyas.engine.kernels.sampling import draft_noise
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import CoupledDraftModel, Drafted, DraftModel, FeatureTap, MaskedDraftModel
from eyas.engine.speculation.depth import ladder, shallower
from eyas.engine.speculation.drafters.channels import mail_place, may_mail
from eyas.engine.speculation.feature_rows import RING_ROWS, DeviceWindows, FeatureRing


@dataclass(frozen=True)
class AcceptedChunk:
    """The step's prompt rows: `rows` as the target's forward had them, and the token after each, int32 [C].

    `ends` int32 [E]: rows (of the chunk) that end a prompt, `end_slots` whose they are.
    """

    rows: ForwardRows
    following: torch.Tensor
    ends: torch.Tensor
    end_slots: torch.Tensor


class DeviceDrafter:
    """`head`: in its two halves; `pool`: of the one that drafts.

    `ring`: where depths are adaptive. Then rounds of fewer rows draft less, and those of one row nothing.
    """

    def __init__(
        self,
        head: tuple[FeatureTap, DraftModel[ForwardRows]],
        pool: KvPool,
        tables: SlotTables,
        spec: SpeculationConfig,
        *,
        pdl: bool,
        ring: FeatureRing | None = None,
    ) -> None:
        self._tap = head[0]
        self.taps = self._tap.layers
        self.pool = pool
        self._proposer = DeviceProposer(head[1], pool, tables, spec, pdl=pdl)
        depths = ladder(spec)[1:] if ring is not None else (spec.steps,)
        self._specs = {less.width: less for less in (shallower(spec, depth) for depth in depths)}
        self._ring = ring
        self._side = SideStream(cuda=tables.length.is_cuda)
        self._updated: DeviceDrafter | None = None

    def take_updates(self) -> None:
        """Adapters may update the head's layers, from now on."""
        self._updated = copy.copy(self)
        self._updated._proposer = self._proposer.of_adapters()

    def of(self, *, adapted: bool) -> DeviceDrafter:
        """The drafter of steps in which rows may have adapters, or none has: it launches nothing for them."""
        return self._updated if adapted and self._updated is not None else self

    @property
    def path_rows(self) -> int:
        """Rows of the longest path that a round can accept, its root included: few drafts make short ones."""
        return self._proposer.path_rows

    @property
    def adaptive(self) -> bool:
        """Whether its depth can change."""
        return self._ring is not None

    @property
    def trees(self) -> bool:
        """Whether a proposal can branch."""
        return self._proposer.trees

    def ahead(self, tapped: torch.Tensor, rows: ForwardRows, width: int) -> torch.Tensor | None:
        """Begins what needs no verdict, beside what is launched until `meet`; `behind` takes what it returns.

        That is the context of a block whose rows see it and make nothing of it: refused rows of a chain are
        written over before any row sees them. None: there is no such block, or rows are so many that it gains
        nothing, and `follow` does all. No adapter updates a head with such a block. `tapped`, `rows`: of a
        step without prompts; `width`: as of `follow`.
        """
        block, rounds = self._proposer.head.block, rows.rounds
        if width not in self._specs or rounds is None or block is None or not block.rooted:
            return None
        if rounds.rows > MAX_ROWS:
            return None
        own = slice(0, rounds.rows)
        certain = ForwardRows(rows.tokens[own], rows.positions[own], rows.kv_rows[own], rounds)
        features: list[torch.Tensor] = []

        def context() -> None:
            features.append(self._tap.features(tapped[own], certain.tokens))
            self._proposer.head.keep(features[0], certain.tokens, certain, self.pool)

        self._side.begin(context)
        return features[0]

    def meet(self) -> None:
        """What is launched from now on follows what `ahead` began."""
        self._side.join()

    def behind(self, features: torch.Tensor, slots: torch.Tensor, width: int) -> None:
        """Proposes for `slots` int32 [B] after the verdict on their rounds; `features`: as of `ahead`."""
        self._proposer.propose(Drafted(features, features), slots, self._specs[width])

    def follow(
        self,
        tapped: torch.Tensor,
        tokens: torch.Tensor,
        batch: round_kernels.RoundBatch | None,
        verdicts: round_kernels.RoundVerdicts | None,
        chunk: AcceptedChunk | None,
        width: int,
    ) -> None:
        """tapped [m, layers * hidden], tokens [m] of a step's rows: extend by what is certain, then propose.

        `width`: rows of a round, which says how many drafts of the head the next has. With one row there are
        none, and what is certain waits in the ring; prompts do not wait.
        """
        spec = self._specs.get(width)
        if spec is None and batch is not None:
            assert self._ring is not None and verdicts is not None
            self._ring.keep(tapped, batch, verdicts)
            batch = None
        if batch is None and chunk is None:
            return
        features, whole = self._tap.features(tapped, tokens), self._proposer.head.whole
        parts, rounds = [], None
        if batch is not None and verdicts is not None:
            count = tapped.shape[0] - (0 if chunk is None else chunk.rows.count)
            few = verdicts.path.shape[1]
            batch = self._proposer.batch(batch.slots)
            below = None if spec is None else self._proposer.masked(spec.steps)
            if below is not None and chunk is None:
                self._together(batch, verdicts, features, below)
                return
            extension = self._extension(batch, features, few)
            accepted_path.gather_path(batch, verdicts, features[:count], extension)
            rounds = DecodeRows(batch.slots, extension.rows.starts, few)
            new = extension.rows
            parts.append(
                (extension.features, new.tokens, new.positions, new.kv_rows, extension.last_row, batch.slots)
            )
        if chunk is not None:
            own, before = chunk.rows, 0 if rounds is None else rounds.rows
            rest = features[tapped.shape[0] - own.count :]
            parts.append(
                (
                    rest,
                    own.tokens if whole else chunk.following,
                    own.positions,
                    own.kv_rows,
                    chunk.ends + before,
                    chunk.end_slots,
                )
            )
        joined, tokens, positions, kv_rows, last, slots = (_cat(list(p)) for p in zip(*parts, strict=True))
        rows = ForwardRows(tokens, positions, kv_rows, rounds, depth=int(whole))
        if chunk is not None:
            rows = replace(rows, tiles=chunk.rows.tiles, planned=chunk.rows.planned)
        adapters = self._proposer.adapters_of(rounds, None if chunk is None else chunk.rows.adapters)
        rows = replace(rows, adapters=adapters)
        self._proposer.draft(joined, rows, last, slots, spec, 0 if chunk is None else chunk.ends.shape[0])

    def _together(
        self,
        batch: round_kernels.RoundBatch,
        verdicts: round_kernels.RoundVerdicts,
        features: torch.Tensor,
        below: accepted_path.MaskedRows,
    ) -> None:
        """What rounds made certain, and the rows of the next drafts behind it, in one pass of the head."""
        each = verdicts.path.shape[1] + below.count
        extension = self._extension(batch, features, each)
        accepted_path.gather_path(batch, verdicts, features, extension, below)
        sees = DecodeRows(batch.slots, extension.rows.starts, each)
        drafted = self._proposer.run(extension.features, extension.rows, sees)
        self._proposer.propose_below(drafted, extension.last_row, batch, below.count)

    def features(self, tapped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """tapped [m, layers * hidden], tokens [m] of rows -> [m, head width]."""
        return self._tap.features(tapped, tokens)

    def join(self, words: torch.Tensor, features: torch.Tensor, width: int) -> None:
        """Sequences before their first round: the head runs their newest draft row, then proposes below it.

        words int32 [4, J], features float32 [J, head width], as `device.step.JoinBatch` has them; the tables
        know the sequences already. `width`: as of `follow`.
        """
        slots, tokens, positions, kv_rows = (row.clone() for row in words)  # on 16 bytes, as kernels like it
        rows = round_kernels.RoundRows(tokens, positions, kv_rows, positions)
        last = self._proposer.run(features.to(self.pool.shape.dtype), rows, DecodeRows(slots, positions))
        last = self._proposer.rooted(last, slots, slots.shape[0])
        if (spec := self._specs.get(width)) is not None:
            self._proposer.propose(last, slots, spec)

    def catch_up(self, words: torch.Tensor, width: int) -> None:
        """The head runs rows that wait in the ring, then proposes below them.

        words int32 [2, J]: as `FeatureRing.waiting` has them. `width`: as of `follow`.
        """
        assert self._ring is not None
        slots = words[0].clone()
        tapped, tokens, rows, counts = self._ring.waiting(words, self.pool.page_size)
        rounds, features = DecodeRows(slots, rows.starts, RING_ROWS), self._tap.features(tapped, tokens)
        if (spec := self._specs.get(width)) is None:
            self._proposer.keep(features, rows, rounds)
            return
        drafted = self._proposer.run(features, rows, rounds)
        first = torch.arange(0, rows.tokens.shape[0], RING_ROWS, dtype=torch.int32, device=words.device)
        newest = first + (counts - 1).clamp(min=0)
        last = self._proposer.rooted(self._proposer.picked(drafted, newest), slots, slots.shape[0])
        self._proposer.propose(last, slots, spec)

    @staticmethod
    def _extension(
        batch: round_kernels.RoundBatch, features: torch.Tensor, few: int
    ) -> accepted_path.PathRows:
        count = batch.size * few
        rows, last = round_rows(batch.slots, count), batch.slots.new_empty(batch.size)
        return accepted_path.PathRows(features.new_empty(count, features.shape[1]), rows, last)


class DeviceTap:
    """Features for a drafter elsewhere; nothing is proposed inside the step. `width`: rows of a round.

    `windows`: where they stay, if they may go from GPU to GPU; None: all come to the host. `place`: a
    sequence's in the rings in draft workers' GPUs, and in their mailboxes. `mails`: have any sequences one?
    """

    def __init__(
        self, tap: FeatureTap, spec: SpeculationConfig, width: int, windows: DeviceWindows | None = None
    ) -> None:
        self._tap = tap
        self._side = SideStream(cuda=windows is not None and windows.rows.is_cuda)
        self.windows = windows
        self.mails = windows is not None and may_mail(spec)
        self.taps = tap.layers
        self.path_rows = min(spec.deepest + 1, width)
        self.place = mail_place(spec)
        self.trees = spec.topk > 1

    def features(self, tapped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """As of `DeviceDrafter`."""
        return self._tap.features(tapped, tokens)

    def ahead(
        self, tapped: torch.Tensor, tokens: torch.Tensor, send: Callable[[torch.Tensor], None]
    ) -> torch.Tensor | None:
        """The features of rounds whose rows are in order whatever is accepted, and what `send` launches for
        them, beside what is launched until `meet`. None: there are too many rows for a gain.
        """
        if self.windows is None or tapped.shape[0] > MAX_ROWS:
            return None
        features: list[torch.Tensor] = []

        def early() -> None:
            features.append(self._tap.features(tapped, tokens))
            send(features[0])

        self._side.begin(early)
        return features[0]

    def meet(self) -> None:
        """As of `DeviceDrafter`."""
        self._side.join()


class DeviceProposer:
    """The head's half that drafts, over a pool and the tables of the worker that has the sequences.

    `firsts` int32 [slots], where other engines decode the sequences: the first row that is one, and may be
    seen; None: this engine decodes them, and all rows may be seen.
    """

    def __init__(
        self,
        head: DraftModel[ForwardRows],
        pool: KvPool,
        tables: SlotTables,
        spec: SpeculationConfig,
        *,
        pdl: bool,
        firsts: torch.Tensor | None = None,
    ) -> None:
        self.head = head
        self.pool = pool
        self._tables = tables
        self.spec = spec
        self._pdl = pdl
        self._firsts = firsts
        self._adapters: torch.Tensor | None = None  # of each slot, where they update the head

    def of_adapters(self) -> Self:
        """The same of a head that the adapters of slots update."""
        updated = copy.copy(self)
        updated._adapters = self._tables.adapter
        return updated

    def adapters_of(
        self, rounds: DecodeRows | None, behind: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The adapters of the rows of rounds, and those of the rows behind them, int32; None: none counts."""
        if self._adapters is None:
            return None
        parts = [] if behind is None else [behind]
        if rounds is not None:
            own = self._adapters.index_select(0, rounds.slots)
            parts.insert(0, own[:, None].expand(-1, rounds.width).reshape(-1).contiguous())
        return _cat(parts)

    @property
    def path_rows(self) -> int:
        """As of `DeviceDrafter`."""
        return self.spec.deepest + 1

    @property
    def trees(self) -> bool:
        """As of `DeviceDrafter`."""
        return self.spec.topk > 1

    def draft(
        self,
        features: torch.Tensor,
        rows: ForwardRows,
        last: torch.Tensor,
        slots: torch.Tensor,
        spec: SpeculationConfig | None,
        unrooted: int,
    ) -> None:
        """Certain rows with their `features` [m, head width], then drafts for each of `slots` int32 [B].

        `last` int32 [B]: which of the rows is each one's newest. `spec`: as of `propose`; None: no drafts.
        `unrooted`: as of `rooted`.
        """
        drafted = self.head.forward(features, rows.tokens, rows, self.pool)
        if slots.shape[0] and spec is not None:
            self.propose(self.rooted(self.picked(drafted, last), slots, unrooted), slots, spec)

    def masked(self, steps: int) -> accepted_path.MaskedRows | None:
        """The rows of a chain of `steps` drafts, if its first comes of the newest certain row: they may be
        behind it in one pass. None: the head has no such block, or no other draft comes of it.
        """
        block = self.head.block
        if block is None or block.first >= 0 or not (count := block.width(steps)):
            return None
        head = cast(MaskedDraftModel[ForwardRows], self.head)
        return accepted_path.MaskedRows(count, block.mask_token, head.masked)

    def propose_below(
        self, drafted: Drafted, last: torch.Tensor, batch: round_kernels.RoundBatch, below: int
    ) -> None:
        """Drafts of rows of one pass: the newest, `last` int32 [B], and `below` behind each of them."""
        each = torch.arange(below + 1, dtype=torch.int32, device=last.device)
        scored = gather_rows(drafted.rows, (last[:, None] + each).flatten(), pdl=self._pdl)
        chains.propose_all(batch, self.head.logits(scored), self.head.token_map)

    def picked(self, drafted: Drafted, index: torch.Tensor) -> Drafted:
        """Some of the rows, int32 or int64 [n]; where rows are features too, they are copied once. None are
        copied for a block whose own rows give all drafts.
        """
        if (block := self.head.block) is not None and block.rooted:
            return drafted
        rows = gather_rows(drafted.rows, index, pdl=self._pdl)
        same = drafted.features is drafted.rows
        return Drafted(rows, rows if same else gather_rows(drafted.features, index, pdl=self._pdl))

    def propose(self, last: Drafted, slots: torch.Tensor, spec: SpeculationConfig) -> None:
        """Drafts for each slot; `last` is what the row before its first draft gave. `spec`: no larger than
        the proposer's.
        """
        batch = self.batch(slots)
        if (block := self.head.block) is not None:
            self._block(last, batch, block, spec.steps)
        elif self.trees:
            self._tree(last, batch, spec)
        else:
            self._chain(last, batch, spec.steps)

    def batch(self, slots: torch.Tensor) -> round_kernels.RoundBatch:
        """The sequences in `slots` int32 [B], as kernels take them."""
        behind = int(self.head.whole)
        return round_kernels.RoundBatch(self._tables, slots, self.pool.page_size, self._pdl, behind)

    def rooted(self, last: Drafted, slots: torch.Tensor, count: int) -> Drafted:
        """What the row before each one's first draft gave, of what its newest row did: of a whole model it is
        the root's, which the last `count` of `slots` have yet to run.
        """
        if not (self.head.whole and count):
            return last
        own = slots[-count:].clone()  # on 16 bytes, as kernels like it
        batch, rows = self.batch(own), round_rows(own, count)
        round_kernels.prepare(batch, rows, torch.empty(1, count, 1, dtype=torch.int64, device=own.device))
        ran = self.run(last.features, rows, DecodeRows(own, rows.starts), 1).rows
        joined = _cat([last.rows[:-count], ran]) if count < slots.shape[0] else ran
        return Drafted(joined, joined)

    def _chain(self, last: Drafted, batch: round_kernels.RoundBatch, steps: int) -> None:
        rows = round_rows(batch.slots, batch.size)
        for step in range(steps):
            chains.propose(batch, self.head.logits(last.rows), step, self.head.token_map, rows)
            if step + 1 < steps:
                last = self.run(last.features, rows, DecodeRows(batch.slots, rows.starts), step + 1)

    def _block(self, last: Drafted, batch: round_kernels.RoundBatch, block: DraftBlock, steps: int) -> None:
        """All drafts of a chain by one pass."""
        width, scored = block.width(steps), last.rows
        if width:
            rows = round_rows(batch.slots, batch.size * width)
            mask = torch.empty(1, batch.size, width, dtype=torch.int64, device=scored.device)
            fewer = block.first > 0 and batch.size * width <= MAX_ROWS  # of more, copies cost what it saves
            leaving = rows.tokens.new_empty(batch.size * steps) if fewer else None
            block_rows.lay(batch, block, rows, mask, leaving)
            sees = DecodeRows(batch.slots, rows.starts, width, mask, together=not block.causal)
            made = self.run(last.features, rows, sees, 1, leaving).rows
            if leaving is None:
                each = made.unflatten(0, (batch.size, width))
                each = (
                    torch.cat((scored.unsqueeze(1), each), 1) if block.first < 0 else each[:, block.first :]
                )
                made = each.flatten(0, 1).contiguous()  # one draft of each is a view with gaps
            scored = made
        logits = self.head.logits(scored)
        if not block.coupling:
            chains.propose_all(batch, logits, self.head.token_map)
            return
        sizes = batch.size, steps
        couple = cast(CoupledDraftModel[ForwardRows], self.head).coupling(scored.unflatten(0, sizes))
        rows, before = round_rows(batch.slots, batch.size), batch.tables.root.index_select(0, batch.slots)
        for step, own in enumerate(logits.unflatten(0, sizes).unbind(1)):
            chains.propose(batch, couple(own, step, before), step, self.head.token_map, rows)
            before = rows.tokens

    def _tree(self, last: Drafted, batch: round_kernels.RoundBatch, spec: SpeculationConfig) -> None:
        """EAGLE-2: every level runs the k best nodes of each sequence."""
        k = spec.topk
        growth = trees.new_growth(spec, batch.size, self.head.token_map, str(last.rows.device))
        for level in range(spec.steps):
            logits = self.head.logits(last.rows)
            draft_noise.add_noise(batch, level, logits, self.head.token_map)
            best, ids = logits.softmax(-1).topk(k)
            below = None
            if level + 1 < spec.steps:
                rows = round_rows(batch.slots, batch.size * k)
                below = trees.TreeFrontier(rows, batch.slots.new_empty(batch.size * k))
            trees.grow(batch, growth, level, best, ids, below)
            if below is not None:
                sees = DecodeRows(batch.slots, below.rows.starts, k, growth.visible[level], (level + 1) * k)
                features = last.features.index_select(0, below.sources)
                last = self.run(features, below.rows, sees, level + 1)
        trees.select(batch, growth)

    def run(
        self,
        features: torch.Tensor,
        rows: round_kernels.RoundRows,
        rounds: DecodeRows,
        depth: int = 0,
        leaving: torch.Tensor | None = None,
    ) -> Drafted:
        """Rows without prompts, so far below the certain ones: what the head makes of them, or of those that
        are `leaving` it.
        """
        forward = replace(self._forward(rows, rounds, depth), leaving=leaving)
        return self.head.forward(features, rows.tokens, forward, self.pool)

    def keep(self, features: torch.Tensor, rows: round_kernels.RoundRows, rounds: DecodeRows) -> None:
        """Certain rows, of which only what later rows see of them is wanted."""
        self.head.keep(features, rows.tokens, self._forward(rows, rounds), self.pool)

    def _forward(self, rows: round_kernels.RoundRows, rounds: DecodeRows, depth: int = 0) -> ForwardRows:
        own = rows.tokens, rows.positions, rows.kv_rows, rounds
        adapters = self.adapters_of(rounds)
        return ForwardRows(*own, firsts=self._firsts, depth=depth, adapters=adapters)


def round_rows(like: torch.Tensor, count: int) -> round_kernels.RoundRows:
    """Memory for what a forward reads of `count` rows."""
    return round_kernels.RoundRows(*(like.new_empty(count) for _ in range(4)))


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
