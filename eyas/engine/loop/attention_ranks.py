"""Steps over attention ranks: each attends with its own sequences, and all share the experts.

Rank 0 composes every step for all ranks and tells it to each, so all have the same number of steps and know
how many rows the others have. An idle rank runs no rows of its own and takes part in every exchange: its
experts are asked all the same. Residual rows come back to rank 0, which samples. All pools are one file, of
which each rank has its own pages; so rank 0 copies and moves rows for everybody between two steps.

This file knows steps, processes and their ends. It does not know which sequence belongs to which rank, nor
what an expert is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from eyas.common.errors import EngineError
from eyas.engine.attention.base import AttentionBackend
from eyas.engine.kv.pool import KvPool
from eyas.engine.loop.forwards import Alone
from eyas.engine.models.decoder import Decoder
from eyas.engine.parallel.expert_ranks import ExpertRanks
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import Channel, Followers, RankCall, RankInfo, follow
from eyas.engine.parallel.step_calls import STEP, StepRows, rows_of, step

JOIN = "join"
LOAD_S = 900.0  # the longest that a rank may take to load its experts
STEP_S = 120.0  # the longest that ranks wait for each other
LOST_S = 5.0  # after an exchange has failed, a rank that has ended is looked for so long
LOOK_S = 0.05


class Part:
    """One rank's part of every step."""

    def __init__(self, model: Decoder, pool: KvPool, backend: AttentionBackend, experts: ExpertRanks) -> None:
        self._model = model
        self._own = Alone(model, pool, backend)
        self._pages = pool.shape.pages
        self._experts = experts

    @torch.inference_mode()
    def run(self, group: ProcessGroup, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks call it with the same rows. Rank 0 gets what a `Forward` gives, the others no rows."""
        shares = rows.shares(group.ranks, self._pages // group.ranks)
        counts = [len(share.tokens) for share in shares]
        self._experts.begin(group, counts)
        residual, tapped = self._forward(shares[group.rank])
        sent, none = [counts[group.rank]] + [0] * (group.ranks - 1), [0] * group.ranks
        came = group.exchange(torch.cat((residual, tapped), 1), sent, none if group.rank else counts)
        return came[:, : residual.shape[1]], came[:, residual.shape[1] :]

    def _forward(self, share: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        if share.tokens:
            return self._own(share)
        self._model.serve_others()
        nothing = self._model.ends.embedding.new_empty(0, self._model.config.hidden_size)
        return nothing, nothing.repeat(1, len(share.taps))


def serve(part: Part, rank_info: RankInfo, channel: Channel) -> None:
    """A rank above 0, loaded: it does its part of every step until rank 0 closes the channel.

    It joins the group at rank 0's word: another rank may load for much longer than a group waits.
    """
    channel.ready()
    if channel.read() is None:
        return
    group = ProcessGroup(rank_info, "cpu", STEP_S)
    follow(channel, {STEP: lambda call: _step(part, group, call)})
    group.close()


def _step(part: Part, group: ProcessGroup, call: RankCall) -> None:
    part.run(group, rows_of(call))


class AttentionRanks:
    """Rank 0's side: a `Forward` whose rows are computed by all ranks. It owns the others until `close`."""

    def __init__(self, part: Part, followers: Followers) -> None:
        """Waits for the others to be loaded. Raises EngineError, and ends them, if one cannot."""
        self._part = part
        self._followers = followers
        self._whole = True
        try:
            followers.wait_ready(LOAD_S)
            followers.broadcast(RankCall(JOIN))
            self._group = ProcessGroup(followers.rank_info, "cpu", STEP_S, followers.check)
        except BaseException:
            followers.close()
            raise

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """R rows, in the order of their ranks -> [R, hidden], and [R, len(taps) * hidden].

        Raises EngineError if a rank has ended, or does not come within STEP_S.
        """
        whole, self._whole = self._whole, False  # a failure on the way leaves ranks out of step for good
        with self._in_plain_words():
            self._followers.broadcast(step(rows))
            found = self._part.run(self._group, rows)
        self._whole = whole
        return found

    @contextlib.contextmanager
    def _in_plain_words(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of an exchange
            self._say_who_ended()
            raise EngineError(f"the attention ranks could not do a step together: {error}") from error

    def _say_who_ended(self) -> None:
        """Raises EngineError with the reason of a rank that has ended, or ends soon."""
        deadline = time.monotonic() + LOST_S
        while time.monotonic() < deadline:
            self._followers.check()
            time.sleep(LOOK_S)

    def close(self) -> bool:
        """Parts from the others; if one is lost, nothing is waited for. Were all there?"""
        if self._whole:
            self._followers.dismiss()
            self._group.close()
        self._followers.close()
        return self._whole
