"""KV of 32 sequences of models with windows, beside that of all layers whole: `python -m tests.window_pages`.

Counted on a CPU by the scheduler's own page tables: no model is loaded, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence
from eyas.engine.kv.groups import kv_groups, page_layers
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.scheduling.page_tables import PageTables
from kv_transfer.layout import pages_for

PAGE, SEQUENCES, CHUNK = 16, 32, 8192
Sights = list[tuple[int, int]]
SHAPES: dict[str, tuple[Sights, int]] = {  # (window, chunk) of each layer, and its bytes per token in bf16
    "gpt-oss-20b": ([(128, 0), (0, 0)] * 12, 2048),
    "gpt-oss-120b": ([(128, 0), (0, 0)] * 18, 2048),
    "Gemma 3 27B": ([(0, 0) if i % 6 == 5 else (1024, 0) for i in range(62)], 8192),
    "Gemma 2 9B": ([(4096, 0), (0, 0)] * 21, 8192),
    "OLMo 3 32B": ([(0, 0) if i % 4 == 3 else (4096, 0) for i in range(64)], 4096),
    "Llama 4 Scout": ([(0, 0) if i % 4 == 3 else (0, 8192) for i in range(48)], 4096),
    "Mistral 7B v0.1": ([(4096, 0)] * 32, 4096),
}


class InUse(NamedTuple):
    """Layers of pages: while all sequences decode, the most on the way there, and of all layers whole."""

    decoding: int
    most: int
    whole: int

    @property
    def ratio(self) -> float:
        """The part of all layers whole that is in use while all decode."""
        return self.decoding / self.whole


def in_use(sights: SequenceOf[tuple[int, int]], length: int) -> InUse:
    """Prompts of `length` tokens, one after the other in chunks, then all decode."""
    groups, limits = kv_groups(sights), BatchLimits(PAGE, SEQUENCES, CHUNK, 1)
    pool, most, layers = PagePool(1 << 20), 0, page_layers(groups)
    tables = PageTables(pool, PrefixCache(pool, PAGE, lookahead=0, groups=groups), limits)
    for number in range(SEQUENCES):
        ids = range(number * length, (number + 1) * length)  # no two begin alike
        generation = Generation(
            GenerationRequest(str(number), ids, SamplingParams()), 0, GenerationKind.LOCAL, 0.0, 0.0
        )
        seq = Sequence(number, generation, 0, ids, [])
        counts = tables.counts(length + limits.rows_ahead, 0, generation.kind, pulled=False)
        seq.tables = tables.made(tuple([] for _ in groups), counts, length, pulled=False)
        while seq.kv_len < length:
            assert tables.grow(seq)
            seq.kv_len = tables.cover(seq, min(seq.kv_len + CHUNK, length))
            most = max(most, pool.used)
        assert tables.grow(seq)
    whole = SEQUENCES * pages_for(length + limits.rows_ahead, PAGE) * len(sights)
    return InUse(pool.used * layers, most * layers, whole)


def main() -> None:
    """A table in Markdown."""
    lengths = (1024, 8192, 32768)
    print("| | groups of layers |", " | ".join(f"32 x {length:,}" for length in lengths), "|")
    print("|---|---|" + "---|" * len(lengths))
    for name, (sights, row) in SHAPES.items():
        cells = []
        for length in lengths:
            found = in_use(sights, length)
            gib = [count * row * PAGE / 2**30 for count in (found.decoding, found.whole)]
            cells.append(f"{gib[0]:.2f} of {gib[1]:.2f} GiB: {found.ratio:.3f}")
        groups = kv_groups(sights)
        print(f"| {name} | {len(groups)} of {page_layers(groups)} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
