"""Triton's interpreter as these tests need it: numbers read from memory may bound a loop, and it hurries.

The interpreter's numbers are arrays of one element, and numpy >= 2.4 takes none of those as an index. It
replaces the language by its own for every call of a function, also within a kernel where that is done; it
computes overflows that it then does not look at; what it rounds to FP8 loses the carry of a mantissa, and
what it reads of it is always a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch = interpreter._patch_lang
_convert = interpreter._convert_float
_patched: set[ModuleType] = set()


class _Scope(interpreter._LangPatchScope):
    """Modules replaced until the kernel ends."""

    def __init__(self, replaced: set[ModuleType], restore: Callable[[], None]) -> None:
        super().__init__()
        self._replaced = replaced
        self._restore = restore

    def restore(self) -> None:
        self._restore()
        _patched.difference_update(self._replaced)


def _patch_with_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _patch_once(kernel: Callable[..., None]) -> interpreter._LangPatchScope:
    modules = {lang for lang in (tl, tl.core) if any(lang is value for value in kernel.__globals__.values())}
    if modules <= _patched:
        return interpreter._LangPatchScope()
    _patched.update(modules)
    return _Scope(modules, _patch(kernel).restore)


def _convert_to_fp8(values: np.ndarray[Any, Any], source: tl.dtype, target: tl.dtype, mode: Any) -> Any:
    """To e4m3 as torch rounds, and GPUs do; and from it, what is no number included."""
    if source == tl.float8e4nv and target == tl.float16:
        stored = torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn)
        return stored.half().view(torch.int16).numpy().view(np.uint16)
    if source != tl.float32 or target != tl.float8e4nv:
        return _convert(values, source, target, mode)
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


def install() -> None:
    """From now on, in this process."""
    interpreter._convert_float = _convert_to_fp8
    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang = _patch_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
