"""Engines broken on purpose: what the comparison must notice, or it would prove nothing.

Each fault is a context manager that breaks the engines built or running in this process inside it. One breaks
the drafter alone, and must not change a token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from eyas.engine.batch.spans import StatePlace
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.kv.states import NO_STATE
from eyas.engine.sampling.noise import streams
from eyas.engine.sampling.processors import SampledRow
from eyas.engine.speculation.drafters.base import AcceptedRows
from eyas.engine.speculation.drafters.colocated import ColocatedDrafter
from eyas.engine.speculation.verify import TreeVerdict, walk
from eyas.engine.states.store import StateStore

Fault = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def accepts_a_wrong_child() -> Iterator[None]:
    """The last node below the root is accepted, whatever the target says there."""

    def trusting(tree: DraftTree | None, chosen: Sequence[int]) -> TreeVerdict:
        if tree is None or walk(tree, chosen).path:
            return walk(tree, chosen)
        child = tree.children(-1)[-1]
        return TreeVerdict((child,), (tree.tokens[child], chosen[1 + child]))

    with mock.patch("eyas.engine.loop.plain_runner.walk", trusting):
        yield


@contextlib.contextmanager
def noise_by_row() -> Iterator[None]:
    """Noise is keyed by a row's place in the step, not by the token's position."""

    def misplaced(rows: Sequence[SampledRow], like: torch.Tensor) -> torch.Tensor:
        return streams([(row.params.seed, i, row.choice) for i, row in enumerate(rows)], like.device)

    with mock.patch("eyas.engine.sampling.sampler._streams", misplaced):
        yield


@contextlib.contextmanager
def penalties_without_ancestors() -> Iterator[None]:
    """Penalties at a node count the output and forget the draft tokens above it."""

    def forgetful(*fields: Any) -> SampledRow:
        return dataclasses.replace(SampledRow(*fields), ancestors=())

    with mock.patch("eyas.engine.loop.plain_runner.SampledRow", forgetful):
        yield


@contextlib.contextmanager
def rows_stay() -> Iterator[None]:
    """The accepted rows of a tree are left where they were verified."""
    with mock.patch.object(KvPool, "move", lambda self, src, dst: None):
        yield


@contextlib.contextmanager
def stale_features() -> Iterator[None]:
    """The draft head gets each row with the feature of the row before: that costs acceptance, no token."""
    post, newest = ColocatedDrafter.post, dict[int, torch.Tensor]()

    def late(drafter: ColocatedDrafter, commits: Sequence[AcceptedRows]) -> None:
        shifted = []
        for commit in commits:
            before = newest.get(id(commit.seq), commit.features[:1])
            newest[id(commit.seq)] = commit.features[-1:]
            features = torch.cat([before, commit.features[:-1]])
            shifted.append(dataclasses.replace(commit, features=features))
        post(drafter, shifted)

    with mock.patch.object(ColocatedDrafter, "post", late):
        yield


@contextlib.contextmanager
def ring_rows_stay() -> Iterator[None]:
    """The rows of accepted drafts that a state is to be made of are left where they were verified."""
    with mock.patch.object(StateStore, "move", lambda *_: None):
        yield


@contextlib.contextmanager
def states_of_other_prefixes() -> Iterator[None]:
    """Who resumes does so from a state that another prefix left."""
    behind = PrefixCache.state_behind

    def other(cache: PrefixCache, pages: Sequence[int]) -> int:
        own = behind(cache, pages)
        others = [node.state for node in cache._nodes.values() if node.state not in (NO_STATE, own)]
        return others[0] if own != NO_STATE and others else own

    with mock.patch.object(PrefixCache, "state_behind", other):
        yield


@contextlib.contextmanager
def states_run_on() -> Iterator[None]:
    """What a sequence left behind in a slot is taken for that of the next one there."""

    def one_stay(slot: int, bound: int, fold: int, stay: int) -> StatePlace:
        return StatePlace(slot, bound, fold, min(stay, 0))

    with mock.patch("eyas.engine.loop.plain_runner.StatePlace", one_stay):
        yield
