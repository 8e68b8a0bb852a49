"""Updates of experts whose matrices a module has as one parameter, which PEFT calls `target_parameters`.

A [experts rank, k] has the lower factors one below the other; B [n, rank experts] has of each rank the column
of every expert. PEFT wraps the module once for each of its parameters, so a name does not say which it is:
shapes do. At first PEFT took A and B for a parameter [experts, n, k] as it is stored: then A has n columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from eyas.common.errors import InvalidRequest
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.checkpoint.host_tensors import HostSlice
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.ipc.adapter_messages import LORA_PATH

_GATE_UP = StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"))
_UP = StackedTensor("experts.up_proj", ("up_proj.weight",))
_DOWN = StackedTensor("experts.down_proj", ("down_proj.weight",))


@dataclass(frozen=True)
class FusedParameter:
    """A parameter of all experts of a layer, `kind`, below `module`. `turned`: A has its rows, as of old."""

    module: str
    kind: StackedTensor
    experts: int
    turned: bool

    @property
    def name(self) -> str:
        """The name that patterns of ranks match."""
        return f"{self.module}.{self.kind.name.rpartition('.')[2]}"

    def factors(
        self, lower: torch.Tensor, upper: torch.Tensor, model: ModelConfig
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yields for each matrix of each expert the model's name of it, the lower factor [rank, k] and the
        upper one [n, rank].
        """
        downs = lower.view(self.experts, -1, lower.shape[1])
        ups = upper.view(upper.shape[0], -1, self.experts).permute(2, 0, 1)
        if self.turned:
            downs, ups = ups.transpose(1, 2), downs.transpose(1, 2)
        name = model.spelling(self.name)
        known = (kind for kind in model.fused if isinstance(kind, StackedTensor) and kind.holds(name))
        kind = replace(next(known, self.kind), transposed=False, columns=0)  # as experts compute
        for part, view in kind.split(name, tuple(ups.shape)):
            (expert,) = re.findall(r"\.experts\.(\d+)\.", part)
            yield part, downs[int(expert)], view(HostSlice("F32", ups))[:]


def parameter_of(
    module: str, lower: tuple[int, ...], upper: tuple[int, ...], model: ModelConfig, old: bool
) -> FusedParameter | None:
    """The parameter that factors A and B of these shapes update; None: the module is not all experts' own.
    `old`: as PEFT had them at first. Shapes say it, but of a square parameter.

    Raises InvalidRequest if the model's experts have no such one.
    """
    stem = module.replace(".base_layer", "")
    if not stem.endswith(".experts"):
        return None
    number = re.search(r"\.layers\.(\d+)\.", stem)
    layers = model.layers[int(number[1]) :][:1] if number else ()
    for spec in (layer.feed_forward for layer in layers):
        if isinstance(spec, ExpertsSpec):
            hidden, width = spec.latent or model.hidden_size, spec.width
            sizes = {_GATE_UP if spec.gated else _UP: (hidden, width << spec.gated), _DOWN: (width, hidden)}
            old &= not any(isinstance(kind, StackedTensor) and kind.transposed for kind in model.fused)
            for turned in (old, not old):
                for kind, (columns, rows) in sizes.items():
                    ends = (rows, columns) if turned else (columns, rows)
                    if (lower[1:], upper[:1]) == (ends[:1], ends[1:]):
                        return FusedParameter(stem, kind, spec.experts, turned)
    text = f"{module} has factors {list(lower)} and {list(upper)}: no parameter of this model's experts"
    raise InvalidRequest(text, param=LORA_PATH)
