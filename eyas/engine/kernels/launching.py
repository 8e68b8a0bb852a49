"""How kernels follow each other without a gap (programmatic dependent launch). It knows no kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Lets the next kernel be launched, and waits for the memory of the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def call_ahead(lines):
    """Calls lines of memory (pointers, one for each) into the L2 cache: a hint, before the kernel may read.

    Addresses must exist, whatever the kernels before have written or have not yet.
    """
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
