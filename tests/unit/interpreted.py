"""Triton's interpreter as these tests need it: numbers read from memory may bound a loop.

The interpreter's numbers are arrays of one element, and numpy >= 2.4 takes none of those as an index.
"""

from __future__ import annotations

from triton.runtime import interpreter

_patch_as_shipped = interpreter._patch_lang_tensor


def _patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
    _patch_as_shipped(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def install() -> None:
    interpreter._patch_lang_tensor = _patch
