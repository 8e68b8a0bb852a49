"""The drafter's interface: it takes commits, gives proposals, and never blocks a step.

One implementation drafts in this engine, another talks to a draft service, a third looks drafts up in the
text. Proposals are advice: a missing, late or wrong one costs speed, never a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from eyas.common.config import SpeculationConfig
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tree import DraftTree
from eyas.engine.ipc.messages import DraftDown, DraftUp


@dataclass(frozen=True)
class AcceptedRows:
    """Rows that became certain. Row j pairs the feature of position base + j with the token at base + j + 1.

    `features`: [len(tokens), head width], or where a device keeps them. `spec`: the last row is the newest,
    and a proposal below it should be like this; None: none is needed. `ringed`: as of `StepResult`. `late`:
    the round that made them certain had no drafts.
    """

    seq: Sequence
    base: int
    tokens: SequenceOf[int]
    features: Any
    spec: SpeculationConfig | None
    ringed: int = 0
    late: bool = False

    @property
    def generated(self) -> bool:
        """Are its tokens the model's own? Then no other sequence and no worker waits for its rows."""
        return self.base >= len(self.seq.prompt) - 1

    def joined(self, following: AcceptedRows) -> AcceptedRows:
        """Both as one."""
        features = torch.cat((self.features, following.features))
        return AcceptedRows(self.seq, self.base, (*self.tokens, *following.tokens), features, following.spec)


@dataclass(frozen=True)
class SequenceProposal:
    """A proposal for a sequence: `tree` hangs below the token at position `base`."""

    seq: Sequence
    base: int
    tree: DraftTree


class Drafter(ABC):
    """Drafts for the sequences that it follows. Used by the engine's thread only."""

    @property
    def missed_rounds(self) -> int:
        """Running total over all sequences: rounds that went on before the draft they had asked for."""
        return 0

    @property
    def sent(self) -> Mapping[str, int]:
        """Running totals of the commits that went to drafters far away, by path."""
        return {}

    @property
    def bells(self) -> SequenceOf[int]:
        """Descriptors that can be read when `arrived` has something to do."""
        return ()

    @property
    @abstractmethod
    def local_kv(self) -> bool:
        """Whether draft KV lives in this engine's pages, and so in its prefix cache and its offers."""

    @abstractmethod
    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        """Follows a sequence from row `base` on. The rows below are pulled by `handle`, or do not exist.

        False: no drafter is available at the moment.
        """

    def begin(self, seq: Sequence, base: int, want: SpeculationConfig | None) -> bool:
        """Follows a sequence whose prompt is still computed, from row `base` on, if the device will post its
        rows, which ask for what is `want`ed. False: it is to be opened when its prompt is there.
        """
        return False

    @abstractmethod
    def post(self, commits: SequenceOf[AcceptedRows]) -> None:
        """Takes the rows that became certain in this step, for the whole batch."""

    def grew(self, seq: Sequence) -> None:  # noqa: B027
        """A sequence, followed or not, has new tokens: for who needs no features to propose."""

    @abstractmethod
    def take(self) -> list[SequenceProposal]:
        """The proposals that arrived since the last call."""

    @abstractmethod
    def owed(self) -> bool:
        """Whether a proposal is outstanding that is worth waiting for."""

    def in_time(self) -> bool:
        """Is there a sequence whose proposals come from far away, and are waited for?"""
        return False

    @abstractmethod
    def close(self, seq: Sequence) -> None:
        """Stops following a sequence; does nothing for an unknown one."""

    def outgoing(self) -> list[DraftUp]:
        """What a drafter far away is to be sent now, one message per draft worker."""
        return []

    def leave(self) -> None:  # noqa: B027
        """The engine ends: what is shared with others is let go of."""

    def arrived(self) -> list[DraftDown]:
        """What has come past the front since the last call; it is for `deliver`."""
        return []

    def deliver(self, down: DraftDown) -> list[tuple[KvHandle, int]]:
        """What a draft worker sent. Gives the handles, and the attempts of their requests, that no drafter
        will pull now, as far as is known here.
        """
        return []
