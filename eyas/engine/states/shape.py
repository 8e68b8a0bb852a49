"""The sizes of a layer that keeps a recurrent state: what its pool, its kernels and its equations share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

ALIGNMENT = 256
"""Bytes at whose multiples the parts of a slot begin."""

FLOATS = ("states", "gates")
"""The parts of a slot that are float32, whatever the model's dtype."""

SPAN = 64
"""Tokens between the positions at which a state may stand: it is that of the last multiple passed."""


def ring_rows(width: int) -> int:
    """Places of a ring, a multiple of SPAN: of the rows before a fold, and of two rounds of `width` rows."""
    return -(-(SPAN + 2 * width) // SPAN) * SPAN


def aligned(count: int) -> int:
    """Bytes of a part of `count` bytes, up to the next one."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """A layer of the gated delta rule (arXiv 2412.06464), or of its kind.

    A state is float32 [value_heads, key_size, value_size]; value heads share keys in groups, as queries do in
    grouped attention. `kernel`: rows that the convolution before it reads, its own the last of them. `reach`:
    the largest share of a correction. `norm_eps`: of the norms in it (0.0: as of all others).
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    reach: float = 1.0
    norm_eps: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of layer, in a few words."""
        return "a state of the gated delta rule" + f", reaching {self.reach:g}," * (self.reach != 1.0)

    @property
    def divisible(self) -> bool:
        """Whether ranks can divide its heads."""
        return type(self) is DeltaShape

    @property
    def corrects(self) -> bool:
        """Whether a row corrects what its state has for its key, or adds to it."""
        return True

    @property
    def inputs(self) -> int:
        """The convolution's columns: q and k of all key heads, then v of all value heads."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def gate_counts(self) -> tuple[int, int]:
        """A row's float32 numbers behind them: logarithms of decays by value heads, and each one's factor."""
        return self.value_heads, self.value_heads

    @property
    def gates(self) -> int:
        """Their sum."""
        return sum(self.gate_counts)

    def weights(self, hidden: int) -> int:
        """Elements of a layer's matrices: of what a row is made of, the gate, and the way back."""
        numbers = self.value_heads * (1 + self.corrects)
        return hidden * (self.inputs + numbers + 2 * self.value_heads * self.value_size)

    @property
    def spare_rows(self) -> int:
        """Rows that the product before it has for its own sake, behind all others."""
        return 0

    @property
    def state(self) -> tuple[int, int, int]:
        """The sides of a state."""
        return self.value_heads, self.key_size, self.value_size

    @property
    def tail(self) -> tuple[int, int]:
        """The sides of the convolution's inputs of the rows just before a state's position."""
        return self.kernel - 1, self.inputs

    def parts(self, ring: int) -> dict[str, tuple[int, ...]]:
        """The sides of each part of a layer's slot, whose ring has `ring` places."""
        gates, inputs = (ring, self.gates), (ring, self.inputs)
        return {"states": self.state, "gates": gates, "tails": self.tail, "inputs": inputs}

    def slot_bytes(self, ring: int, itemsize: int) -> int:
        """Bytes of a layer's slot; `itemsize`: of the model's dtype."""
        sizes = {name: 4 if name in FLOATS else itemsize for name in self.parts(ring)}
        return sum(aligned(math.prod(sides) * sizes[name]) for name, sides in self.parts(ring).items())

    @property
    def solved(self) -> dict[str, tuple[int, ...]]:
        """The sides of each part of what a GPU's kernels keep of a row beside its slot, of an empty state
        nothing: `SolvedRows`.
        """
        heads = self.value_heads if self.key_size else 0
        misses, solved = (self.value_size, SPAN) if self.corrects else (0, 0)
        return {
            "keys": (self.key_heads, self.key_size),
            "added": (heads, self.value_size),
            "misses": (heads, misses),
            "solved": (heads, solved),
            "sums": (heads,),
        }

    def solved_bytes(self, ring: int, itemsize: int) -> int:
        """Bytes of that for the rows of a slot; `itemsize`: of the model's dtype."""
        sizes = {"solved": 4, "sums": 8}
        return ring * sum(math.prod(sides) * sizes.get(name, itemsize) for name, sides in self.solved.items())

    def complaints(self) -> Iterator[str]:
        """Finds impossible numbers; a sentence for each."""
        sizes = {
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_size,
            "linear_value_head_dim": self.value_size,
        }
        yield from (f"{name} {size} must be 1 or more" for name, size in sizes.items() if size < 1)
        if self.key_heads > 0 and self.value_heads % self.key_heads:
            yield f"linear_num_key_heads {self.key_heads} does not divide the {self.value_heads} value heads"
        if not 2 <= self.kernel <= SPAN:
            yield f"linear_conv_kernel_dim {self.kernel} is not between 2 and {SPAN}"

    def of_rank(self, ranks: int) -> DeltaShape:
        """One rank's share: its heads."""
        return dataclasses.replace(
            self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks
        )


@dataclasses.dataclass(frozen=True)
class ChannelShape(DeltaShape):
    """A layer of Kimi Delta Attention (arXiv 2510.26692): each element of a key decays by itself. `rank`: of
    the two factors by which decays are made, and of those that make gates.
    """

    rank: int = 0

    @property
    def kind(self) -> str:
        """The kind of layer, in a few words."""
        return "a state of Kimi Delta Attention"

    @property
    def gate_counts(self) -> tuple[int, int]:
        """Logarithms of the decays of key elements, and each head's factor."""
        return self.value_heads * self.key_size, self.value_heads

    @property
    def solved(self) -> dict[str, tuple[int, ...]]:
        """Nothing: rows are walked again from the state on."""
        return dict.fromkeys(super().solved, (0,))

    def weights(self, hidden: int) -> int:
        """Numbers of a layer's weights: for rows, for the factors of decays and gates, and for the output."""
        decays, values = self.value_heads * self.key_size, self.value_heads * self.value_size
        rows = self.inputs + self.value_heads + 2 * self.rank + values
        return hidden * rows + self.rank * (decays + values)


@dataclasses.dataclass(frozen=True)
class SpaceShape(DeltaShape):
    """A layer of a state space model (Mamba-2, arXiv 2405.21060): keys and queries are its B and C, which are
    taken as the convolution gives them, and values its x; a row adds to the state.

    `limits`: of a step. `bias`: the convolution has one. `norm_groups`: of the norm behind the gate, or with
    `norm_first` before it, equal parts of all heads together (0: there is no norm).
    """

    limits: tuple[float, float] = (0.0, math.inf)
    bias: bool = True
    norm_groups: int = 1
    norm_first: bool = False

    @property
    def kind(self) -> str:
        """The kind of layer, in a few words."""
        return "a state of Mamba-2"

    @property
    def corrects(self) -> bool:
        """A row adds to the state."""
        return False

    @property
    def spare_rows(self) -> int:
        """Its steps once more, where they make the product a whole number of sixteens."""
        rows = self.inputs + self.value_heads * (self.value_size + 1)
        return self.value_heads if rows % 16 and (rows + self.value_heads) % 16 == 0 else 0


@dataclasses.dataclass(frozen=True)
class UngatedShape(DeltaShape):
    """A layer whose rows have no stored gates, and correct nothing of the state."""

    @property
    def corrects(self) -> bool:
        """A row adds to the state, if there is one."""
        return False

    @property
    def gate_counts(self) -> tuple[int, int]:
        """None."""
        return 0, 0


@dataclasses.dataclass(frozen=True)
class ConvolutionShape(UngatedShape):
    """A layer with a convolution alone: its state is empty, and what it needs are the rows just before one.
    The one value head of `value_size` columns is convolved, without an activation.
    """

    @classmethod
    def of_columns(cls, columns: int, kernel: int) -> ConvolutionShape:
        """The shape of a convolution of this number of columns."""
        return cls(key_heads=0, value_heads=1, key_size=0, value_size=columns, kernel=kernel)

    @property
    def kind(self) -> str:
        """The kind of layer, in a few words."""
        return "short convolutions"

    def weights(self, hidden: int) -> int:
        """Numbers of a layer's weights: for what is convolved, for what multiplies it before and behind, and
        for the output.
        """
        return 4 * hidden * self.value_size

    def complaints(self) -> Iterator[str]:
        """Finds impossible numbers; a sentence for each."""
        if not 2 <= self.kernel <= SPAN:
            yield f"conv_L_cache {self.kernel} is not between 2 and {SPAN}"


@dataclasses.dataclass(frozen=True)
class SelectiveShape(UngatedShape):
    """A layer of a selective state space model (Mamba, arXiv 2312.00752): one head of `value_size` columns,
    each element of whose state decays by itself. Its steps, its keys and its queries are products of what the
    convolution gives: rows are stored before it, and nothing beside them. `rank`: of the steps' two factors.
    `norms`: that steps, keys and queries pass, with stored gains or "bare". `bias`: the convolution has one.
    """

    rank: int = 1
    norms: Literal["", "gains", "bare"] = ""
    bias: bool = True

    @property
    def kind(self) -> str:
        """The kind of layer, in a few words."""
        return "a state of Mamba (1)"

    def weights(self, hidden: int) -> int:
        """Numbers of a layer's weights: for rows and the gate, for steps, keys and queries, and for the
        output.
        """
        return self.value_size * (3 * hidden + 2 * self.rank + 2 * self.key_size)

    def complaints(self) -> Iterator[str]:
        """Finds impossible numbers; a sentence for each."""
        if not 2 <= self.kernel <= SPAN:
            yield f"mamba_d_conv {self.kernel} is not between 2 and {SPAN}"
