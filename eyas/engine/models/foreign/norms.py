"""Norms of a foreign model on a GPU: one launch in place of the eight operations of transformers' code.

A module is taken over only if its own results are seen to be those of the one launch.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

_EPS = ("variance_epsilon", "eps", "epsilon")
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""By which part of the largest number results may differ: transformers rounds before the gain as well."""


@torch.inference_mode()
def fuse_norms(model: Any) -> int:
    """Lets one launch compute the norms by a root mean square that it can; how many of them."""
    fused = 0
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and (by := _one_launch(module)) is not None:
            module.forward = by
            fused += 1
    return fused


def _one_launch(module: Any) -> Any:
    """A forward that gives what the module's gives; None: it does other things too."""
    gain: Any = getattr(module, "weight", None)
    if [id(each) for each in module.parameters()] != [id(gain)]:
        return None
    gain = gain.detach()
    eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
    if gain.dim() != 1 or eps is None or len(inspect.signature(module.forward).parameters) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, gain.shape[0], generator=generator).to(gain)
    expected = module(rows)
    for stored in (gain, 1 + gain):
        forward = partial(F.rms_norm, normalized_shape=gain.shape, weight=stored, eps=eps)
        if bool((forward(rows) - expected).abs().max() <= _NEAR[gain.dtype] * expected.abs().max()):
            return forward
    return None
