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
