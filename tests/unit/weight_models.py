"""A model whose weights are replaced."""

from __future__ import annotations

from typing import Any

from eyas.common.config import EngineConfig
from eyas.common.types import KvKind
from eyas.engine.ipc.pulse import no_pulse
from eyas.engine.loading import build
from eyas.engine.loading.device_build import build_state
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import StartPhases
from eyas.engine.models.decoder import Decoder
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo


def model_of(given: EngineConfig) -> tuple[EngineSpec, Decoder[Any]]:
    """The model of an engine, without the engine."""
    loaded = EngineSpec.of(given)
    if given.attention_backend == "torch":
        model = build._plain_model(loaded, loaded.pool(KvKind.TARGET), no_pulse)[0]
    else:
        model = build_state(loaded, ProcessGroup(RankInfo(), "cpu"), StartPhases())[1].model  # type: ignore[assignment]
    assert isinstance(model, Decoder)
    return loaded, model
