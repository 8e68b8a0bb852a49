"""Parts of one array of 4-byte words: where each begins."""

from __future__ import annotations

from collections.abc import Mapping

ALIGNMENT = 4  # words: every part stands on 16 bytes, as kernels like it


def sections(counts: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """First word and number of words of each part, in order; `all`: of the whole."""
    offsets, end = {}, 0
    for name, count in counts.items():
        offsets[name] = (end, count)
        end += -(-count // ALIGNMENT) * ALIGNMENT
    offsets["all"] = (0, end)
    return offsets
