"""The forward of a step: in one process for all rows, or in attention ranks, each for its own sequences.

Rank 0 composes every step for all ranks and tells it to each, so all have the same number of steps and know
how many rows the others have. An idle rank runs no rows of its own and takes part in every exchange: its
experts are asked all the same. Residual rows come back to rank 0, which samples. All pools are one file, of
which each rank has its own pages; so rank 0 copies and moves rows for everybody between two steps.
"""

from __future__ import annotations

from typing import Protocol

import torch

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch, build_batch
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear
from eyas.engine.loop.spread_ranks import RankSpread, spread_calls
from eyas.engine.models.base import DecoderModel
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.parallel.expert_ranks import ExpertRanks
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.leader import LOAD_S, STEP_S, RankLeader, join_leader
from eyas.engine.parallel.ranks import RankCall, RankCalls, RankChannel, RankInfo, follow
from eyas.engine.parallel.step_calls import STEP, StepRows, rows_of, step


class StepForward(Protocol):
    """The rows of one step through all layers, once for each step."""

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the rows as `DecoderModel.forward`: [R, hidden], and [R, len(taps) * hidden]; their KV is
        written.
        """

    def close(self) -> bool:
        """Closes the forward after the last step. False: its memory is lost, so nothing was waited for."""


class LocalForward:
    """One model over one pool."""

    def __init__(self, model: DecoderModel[ForwardBatch], pool: KvPool, backend: AttentionBackend) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """R rows -> [R, hidden], and [R, len(taps) * hidden]."""
        batch = build_batch(rows.spans, rows.tokens, self._pool.page_size, self._backend)
        return self._model.forward(batch, self._pool, rows.taps)

    def close(self) -> bool:
        """True, and nothing else: it owns no thread and no memory."""
        return True


class RankForward:
    """One rank's part of every step."""

    def __init__(
        self, model: Decoder[Linear], pool: KvPool, machine: TorchMachine, experts: ExpertRanks
    ) -> None:
        """`machine`: the model's, whose ranks are `experts`."""
        self._model, self._machine = model, machine
        self._local = LocalForward(model, pool, machine.backend)
        self._pages = pool.shape.pages
        self._experts = experts

    @torch.inference_mode()
    def run(self, group: ProcessGroup, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the same rows on all ranks. Rank 0 gets the result of a `StepForward`, the others no rows."""
        shares = rows.shares(group.ranks, self._pages // group.ranks)
        counts = [len(share.tokens) for share in shares]
        self._experts.begin(group, counts)
        residual, tapped = self._forward(shares[group.rank])
        sent, none = [counts[group.rank]] + [0] * (group.ranks - 1), [0] * group.ranks
        came = group.exchange(torch.cat((residual, tapped), 1), sent, none if group.rank else counts)
        return came[:, : residual.shape[1]], came[:, residual.shape[1] :]

    def _forward(self, share: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        if share.tokens:
            return self._local(share)
        nothing = self._model.ends.embedding.new_empty(0, self._model.config.hidden_size)
        self._machine.serve_others(self._model.layers, nothing)
        return nothing, nothing.repeat(1, len(share.taps))


def serve(
    own: RankForward, rank_info: RankInfo, channel: RankChannel, others: RankCalls, spread: RankSpread | None
) -> None:
    """A rank above 0, loaded: it does its part of every step, and `others` by their kinds, until rank 0
    closes the channel. `spread`: its experts, if some may have replicas.
    """
    group = join_leader(rank_info, channel, "cpu", STEP_S)
    if group is None:
        return
    steps = {STEP: lambda call: _step(own, group, call)}
    follow(channel, {**steps, **others, **spread_calls(spread, group)})
    group.close()


def _step(own: RankForward, group: ProcessGroup, call: RankCall) -> None:
    own.run(group, rows_of(call))


class DataParallelForward:
    """All attention ranks, seen from rank 0, which owns the others until `close`."""

    def __init__(self, own: RankForward, leader: RankLeader) -> None:
        """Waits for the others to be loaded. Raises EngineError, and ends them, if one cannot."""
        self._own = own
        self._leader = leader
        leader.meet("cpu", LOAD_S, STEP_S)

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """R rows, in the order of their ranks -> [R, hidden], and [R, len(taps) * hidden].

        Raises EngineError if a rank has ended, or does not come within STEP_S.
        """
        with self._leader.together():
            self._leader.tell(step(rows))
            return self._own.run(self._leader.group, rows)

    def close(self) -> bool:
        """Parts from the others; if one is lost, nothing is waited for. Were all there?"""
        self._leader.close()
        return self._leader.whole
