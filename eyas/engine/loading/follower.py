"""The process of a rank above 0: builds the same machine with its share of the model; rank 0 calls it.

It schedules nothing, samples nothing for anybody and reads no result; it ends with its channel.
"""

from __future__ import annotations

import torch

from eyas.engine.device import calls
from eyas.engine.device.adapters import FollowerAdapters
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.step import StepInput
from eyas.engine.loading.device_build import WarmRank, build_rank
from eyas.engine.loading.rank_memory import FollowerMemory
from eyas.engine.loading.rank_replacement import FollowerReplacement
from eyas.engine.loading.replacement import WeightReplacement
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import EngineStart
from eyas.engine.loop.spread_ranks import RankSpread, spread_calls
from eyas.engine.models.decoder import Decoder
from eyas.engine.parallel.leader import LOAD_S, join_leader
from eyas.engine.parallel.ranks import RankCall, RankCalls, RankChannel, RankInfo, follow


def main(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    """`loaded`: as rank 0 has it."""
    loaded = loaded.of_rank(rank_info.rank)
    torch.set_num_threads(loaded.config.threads)
    group = join_leader(rank_info, channel, loaded.config.device, LOAD_S)
    if group is None:
        return
    rank = build_rank(loaded, EngineStart(), group, StepExecutor)
    executor = rank.executor
    memory = FollowerMemory(executor.state.movable, channel, executor.wait)
    others = {**_of_weights(rank, channel), **_of_adapters(executor, channel), **memory.calls}
    others |= spread_calls(RankSpread.of(executor.state.model), group)
    follow(channel, {**FollowerRank(executor).calls, **others})
    executor.close()
    group.close()


def _of_weights(rank: WarmRank, channel: RankChannel) -> RankCalls:
    """This rank's calls about new weights, if its model takes some."""
    executor, loaded = rank.executor, rank.loaded
    model = executor.state.model
    if not isinstance(model, Decoder):
        return {}
    own = WeightReplacement(loaded, model)
    return FollowerReplacement(own, loaded.config.device, channel, executor.wait).calls


def _of_adapters(executor: StepExecutor, channel: RankChannel) -> RankCalls:
    """This rank's calls about adapters, if its model has slots for some."""
    own = executor.state.adapters
    return {} if own is None else FollowerAdapters(own, channel, executor.wait).calls


class FollowerRank:
    """`calls`: what is done at each kind of call; the twin of `eyas.engine.device.rank0_executor`."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._step: StepInput | None = None
        self.calls: RankCalls = {
            calls.BEGIN: self._begin,
            calls.SCORE: self._score,
            calls.MASK: self._mask,
            calls.SAMPLE: self._sample,
            calls.FEATURES: self._features,
            calls.FINISH: self._finish,
            calls.JOIN: self._join,
            calls.CATCH_UP: self._catch_up,
            calls.COPY_PAGE: self._copy_page,
            calls.COPY_STATE: self._copy_state,
        }

    def _begin(self, call: RankCall) -> None:
        self._step = calls.step_of(call)
        self._executor.begin(self._step)

    def _score(self, call: RankCall) -> None:
        self._executor.score(calls.score_request_of(call))

    def _mask(self, call: RankCall) -> None:
        self._executor.mask(calls.masked_of(call))

    def _sample(self, call: RankCall) -> None:
        self._executor.sample(calls.rows_of(call))

    def _features(self, call: RankCall) -> None:
        self._executor.features(call.numbers)

    def _join(self, call: RankCall) -> None:
        self._executor.join(calls.joined_of(call))

    def _catch_up(self, call: RankCall) -> None:
        self._executor.catch_up(calls.catch_up_of(call))

    def _finish(self, call: RankCall) -> None:
        assert self._step is not None
        self._executor.finish(self._step)

    def _copy_page(self, call: RankCall) -> None:
        self._executor.copy_page(*call.numbers)

    def _copy_state(self, call: RankCall) -> None:
        self._executor.copy_state(*call.numbers)
