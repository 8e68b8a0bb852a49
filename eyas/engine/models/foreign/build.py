"""Puts a foreign decoder together: loaded, seen to be a row's own, and over pages."""

from __future__ import annotations

import logging

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.models.foreign.check import check_rows
from eyas.engine.models.foreign.decoder import ForeignDecoder, ForeignOutline
from eyas.engine.models.foreign.norms import fuse_norms
from eyas.engine.models.foreign.pages import PagesMachine
from eyas.engine.models.foreign.weights import load


def foreign_model(
    target: ModelConfig, placement: WeightPlacement, machine: PagesMachine
) -> ForeignDecoder | ForeignOutline:
    """The target, whose `foreign` is given. Raises ConfigError if it cannot be served so."""
    if placement.device == "meta":
        return ForeignOutline(target, machine, placement.dtype)
    logging.getLogger("eyas.engine").warning(
        "transformers computes %s, one operation at a time: attention is Eyas', and else norms alone are "
        "fused on a GPU; a step costs about what it does there (--model-impl, docs/models.md)",
        target.architecture,
    )
    model = load(target, placement)
    if placement.device != "cpu":
        fuse_norms(model)
    check_rows(target, model, placement.device)
    return ForeignDecoder(target, model, machine)
