"""Routers by softmax and by sigmoid."""

from __future__ import annotations

from dataclasses import replace

from eyas.engine.checkpoint.config import ExpertsSpec

EPS, HIDDEN = 1e-2, 48
SOFTMAX = ExpertsSpec(
    width=16, experts=12, per_row=4, scores="softmax", normalised=True, scale=1.0, router_bias=True
)
SIGMOID = replace(SOFTMAX, scores="sigmoid", per_row=3, scale=2.5, corrected=True, router_bias=False)
