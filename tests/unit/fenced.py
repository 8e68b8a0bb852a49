"""Finds, in a kernel's TTGIR, numbers for Hopper's matrix unit that pass a barrier before their fence.

What threads write to shared memory for `wgmma` is seen by it behind a fence of each writer, and then a
barrier. Triton (3.6, 3.7) sets the fence before the product, and a barrier behind it only where it knows of
none since the writing: where numbers change threads in between, that is done within a barrier, none comes
behind the fence, and a product may read what was there before. Of two kernels that differ in that alone, an
H200 had wrong numbers by the one that has it. No interpreter sees that, and no error tells of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TURNED = re.compile(r"(%\w+) = ttg\.memdesc_trans (%\w+)")
_PRODUCT = re.compile(r"warp_group_dot (%\w+), (%\w+),")
_WRITTEN = re.compile(r"(%\w+) = ttg\.local_alloc %\w+")
_WITH_BARRIER = re.compile(r"ttg\.convert_layout|tt\.reduce|tt\.scan|gpu\.barrier")


def unfenced(ttgir: str) -> Iterator[str]:
    """The lines that write such numbers."""
    lines = [re.sub(r" loc\(.*", "", line) for line in ttgir.splitlines() if not line.startswith("#")]
    turned = dict(_TURNED.findall("\n".join(lines)))
    read = {name for pair in _PRODUCT.findall("\n".join(lines)) for name in pair}
    read |= {turned[name] for name in read & turned.keys()}
    passed: dict[str, bool] = {}  # of each line that has written since the last fence
    for line in lines:
        if (found := _WRITTEN.search(line)) and found[1] in read:
            passed[line.strip()] = False
        elif "fence_async_shared" in line or "fence.proxy.async" in line:
            yield from (written for written, barrier in passed.items() if barrier)
            passed.clear()
        elif _WITH_BARRIER.search(line):
            passed = dict.fromkeys(passed, True)
