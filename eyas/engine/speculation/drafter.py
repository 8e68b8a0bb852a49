"""The drafter's interface: a mailbox that takes commits and gives proposals, and never blocks a step.

Who drafts (this engine, or a draft service behind a transport) is a matter of which implementation was
built. Proposals are advice: a missing, late or wrong one costs speed, never a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tree import DraftTree
from eyas.engine.ipc.messages import DraftDown, DraftUp


@dataclass(frozen=True)
class Commit:
    """Row j pairs the feature of position base + j with the token at base + j + 1.

    `features`: [len(tokens), head width]. `propose`: the last row is the newest, a proposal is wanted.
    """

    seq: Sequence
    base: int
    tokens: SequenceOf[int]
    features: torch.Tensor
    propose: bool


@dataclass(frozen=True)
class Draft:
    """A proposal for a sequence: `tree` hangs below the token at position `base`."""

    seq: Sequence
    base: int
    tree: DraftTree


class Drafter(ABC):
    late_rounds = 0  # rounds of all sequences that went on before the draft they had asked for, ever

    @property
    @abstractmethod
    def local_kv(self) -> bool:
        """Does draft KV live in this engine's pages (and so in its prefix cache and its offers)?"""

    @abstractmethod
    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        """Follow a sequence from row `base` on; rows below come by `handle`, or do not exist.

        False: nobody can draft at the moment.
        """

    @abstractmethod
    def post(self, commits: SequenceOf[Commit]) -> None:
        """Rows that became certain in this step, whole batch."""

    @abstractmethod
    def take(self) -> list[Draft]:
        """Proposals that arrived since the last call."""

    @abstractmethod
    def owed(self) -> bool:
        """Is a proposal outstanding that is worth waiting for?"""

    @abstractmethod
    def close(self, seq: Sequence) -> None:
        """Stop following a sequence (unknown ones are no-ops)."""

    def outgoing(self) -> list[DraftUp]:
        """What a drafter far away is to be sent now, one message per draft worker."""
        return []

    def deliver(self, down: DraftDown) -> list[tuple[KvHandle, int]]:
        """What a draft worker sent. Gives the handles, and the attempts of their requests, that no drafter
        will pull now, as far as is known here.
        """
        return []
