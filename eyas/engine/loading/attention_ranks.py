"""Builds a model whose experts are spread over attention ranks: rank 0's part here, the others in processes.

Every rank has all of the model but for the experts, of which it has its share. Nothing is computed here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from eyas.common.types import KvKind
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear
from eyas.engine.loading.rank_replacement import FollowerReplacement
from eyas.engine.loading.replacement import WeightReplacement
from eyas.engine.loading.spec import EngineSpec, spread_experts
from eyas.engine.loop.forwards import DataParallelForward, RankForward, serve
from eyas.engine.loop.spread_ranks import RankSpread
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.parallel.expert_ranks import ExpertRanks
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankChannel, RankInfo
from kv_transfer.host_files import new_path

PlainDecoder = Decoder[Linear]


def attention_ranks(
    loaded: EngineSpec, pool: KvPool, beat: Beat
) -> tuple[PlainDecoder, DataParallelForward, RankLeader]:
    """The model of rank 0, all ranks as what computes its steps, and their leader. `pool`: a file, with all
    ranks' pages.

    `beat`: of rank 0, which waits for the others in every layer. Raises EngineError if a rank cannot load.
    """
    assert pool.path is not None
    meeting = new_path("meeting", Path(loaded.config.pool_dir))
    leader = RankLeader(partial(_main, loaded, pool.path), loaded.config.dp_attention, meeting)
    try:
        model, part = _part(loaded, pool, leader.rank_info, beat)
    except BaseException:
        leader.give_up()
        raise
    return model, DataParallelForward(part, leader), leader


def _main(loaded: EngineSpec, path: Path, rank_info: RankInfo, channel: RankChannel) -> None:
    """The process of a rank above 0. `loaded`: as rank 0 has it; `path`: of its pool."""
    torch.set_num_threads(loaded.config.threads)
    pool = KvPool(loaded.shape(KvKind.TARGET), path, theirs=True)
    model, part = _part(loaded, pool, rank_info, no_pulse)
    weights = FollowerReplacement(WeightReplacement(loaded, model), "cpu", channel, lambda: None)
    serve(part, rank_info, channel, weights.calls, RankSpread.of(model))


def _part(
    loaded: EngineSpec, pool: KvPool, rank_info: RankInfo, beat: Beat
) -> tuple[PlainDecoder, RankForward]:
    slots = loaded.slots_of_experts
    experts = ExpertRanks(rank_info, slots)
    spread = spread_experts(loaded, rank_info.rank)
    machine = TorchMachine(loaded.target, loaded.backend(KvKind.TARGET, beat), experts, spread=spread)
    with loaded.weights(KvKind.TARGET) as weights:
        model = Decoder(loaded.target, weights, machine)
    return model, RankForward(model, pool, machine, experts)
