"""The forward pass of a step: in one process, or in attention ranks, each for its own sequences.

Rank 0 composes every step and sends it to all ranks, so each rank knows the number of rows of every other. A
rank without rows still takes part in every exchange, because other ranks' rows may need its experts. Residual
rows return to rank 0, which samples. All ranks' pools are one shared file, of which each rank owns a part, so
that rank 0 copies and moves rows of all ranks between two steps.
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
    """Runs the rows of one step through all layers."""

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the rows as `DecoderModel.forward`: [R, hidden], and [R, len(taps) * hidden]; their KV is
        written.
        """

    def close(self) -> bool:
        """Closes the forward after the last step. False if a rank was lost: its memory must not be waited
        for.
        """


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
        """True: there is no thread and no memory to release."""
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
        """Runs a step's rows on all ranks. Returns all rows on rank 0, as `StepForward` does, else none."""
        shares = rows.shares(group.ranks, self._pages // group.ranks)
        counts = [len(share.tokens) for share in shares]
        self._experts.begin(group, counts)
        residual, tapped = self._forward(shares[group.rank])
        sent, none = [counts[group.rank]] + [0] * (group.ranks - 1), [0] * group.ranks
        received = group.exchange(torch.cat((residual, tapped), 1), sent, none if group.rank else counts)
        return received[:, : residual.shape[1]], received[:, residual.shape[1] :]

    def _forward(self, share: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        if share.tokens:
            return self._local(share)
        no_rows = self._model.ends.embedding.new_empty(0, self._model.config.hidden_size)
        self._machine.serve_others(self._model.layers, no_rows)
        return no_rows, no_rows.repeat(1, len(share.taps))


def serve(
    own: RankForward, rank_info: RankInfo, channel: RankChannel, others: RankCalls, spread: RankSpread | None
) -> None:
    """Runs a rank above 0: its part of every step, and the calls of `others` by kind, until rank 0 closes the
    channel. `spread`: the rank's experts, if they may have replicas.
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
    """The forward of all attention ranks, run by rank 0, which owns the other ranks until `close`."""

    def __init__(self, own: RankForward, leader: RankLeader) -> None:
        """Waits until all ranks are loaded. If one fails, ends all of them and raises EngineError."""
        self._own = own
        self._leader = leader
        leader.meet("cpu", LOAD_S, STEP_S)

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """R rows, in the order of their ranks -> [R, hidden], and [R, len(taps) * hidden].

        Raises EngineError if a rank has ended, or does not answer within STEP_S.
        """
        with self._leader.together():
            self._leader.tell(step(rows))
            return self._own.run(self._leader.group, rows)

    def close(self) -> bool:
        """Ends the other ranks, without waiting if one is lost. False if one was lost."""
        self._leader.close()
        return self._leader.whole
