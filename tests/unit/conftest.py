"""Kernels run in Triton's interpreter here; TRITON_INTERPRET=0 compiles them, where there is a GPU."""

import importlib.util
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("triton") is not None:
    import interpreted

    interpreted.install()
