"""Kernels run in Triton's interpreter here; TRITON_INTERPRET=0 compiles them, where there is a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
