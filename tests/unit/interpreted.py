"""Triton's interpreter as these tests need it: numbers read from memory may bound a loop, and it hurries.

The interpreter's numbers are arrays of one element, and numpy >= 2.4 takes none of those as an index. It
replaces the language by its own for every call of a function, also within a kernel where that is done; it
computes overflows that it then does not look at; what it rounds to FP8 loses the carry of a mantissa, and
what it reads of it is always a number; of a product and a sum it rounds both, where GPUs round once. It knows
one kernel at a time, and engines in several threads launch theirs together: here they take turns.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch = interpreter._patch_lang
_convert = interpreter._convert_float
_get_dtype = interpreter._get_np_dtype
_execute = interpreter.GridExecutor.__call__
_turn = threading.Lock()
_init_block = tl.block_type.__init__
_init_tensor = tl.tensor.__init__
_patched: set[ModuleType] = set()
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensors: dict[str, dict[str, Any]] = {}
_dtypes: dict[str, np.dtype[Any]] = {}
_operands = TritonSemantic.binary_op_type_checking_impl
_numbers: dict[tuple[Any, ...], Any] = {}
_unwrap = tl.core._unwrap_if_constexpr
_PLAIN = ("int1", "int32", "int64", "fp32")
_MOST_NUMBERS = 4096
_CHECKED = tl.core.builtin(lambda: None).__code__


class _Scope(interpreter._LangPatchScope):
    """Modules replaced until the kernel ends."""

    def __init__(self, replaced: frozenset[ModuleType], restore: Callable[[], None]) -> None:
        super().__init__()
        self._replaced = replaced
        self._restore = restore

    def restore(self) -> None:
        self._restore()
        _patched.difference_update(self._replaced)


def _patch_with_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


@functools.cache
def _languages(kernel: Callable[..., None]) -> frozenset[ModuleType]:
    """The modules that a kernel calls the language by."""
    seen = set(map(id, kernel.__globals__.values()))
    return frozenset(lang for lang in (tl, tl.core) if id(lang) in seen)


def _patch_once(kernel: Callable[..., None]) -> interpreter._LangPatchScope:
    modules = _languages(kernel)
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


def _multiply_and_add(
    _: interpreter.InterpreterBuilder,
    x: interpreter.TensorHandle,
    y: interpreter.TensorHandle,
    z: interpreter.TensorHandle,
) -> interpreter.TensorHandle:
    """Float32 by float64, which holds every product."""
    made = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(made.astype(z.data.dtype), z.dtype.scalar)


def _type_block(block: Any, element_ty: tl.dtype, shape: Any) -> None:
    """A type's shape and name are worked out once, not at every operation."""
    key = element_ty.name, *shape
    if key not in _blocks:
        _init_block(block, element_ty, shape)
        _blocks[key] = dict(vars(block))
    vars(block).update(_blocks[key], element_ty=element_ty)


def _type_tensor(tensor: Any, handle: Any, type: tl.dtype) -> None:
    """As `_type_block`: of a tensor's parts only the handle is its own."""
    if type.name not in _tensors:
        _init_tensor(tensor, handle, type)
        _tensors[type.name] = {name: vars(tensor)[name] for name in ("shape", "numel")}
    vars(tensor).update(_tensors[type.name], handle=handle, type=type, dtype=type.scalar)


def _numpy_dtype(type: tl.dtype) -> np.dtype[Any]:
    """Looked up, not tabulated at every call."""
    if type.name not in _dtypes:
        _dtypes[type.name] = _get_dtype(type)
    return _dtypes[type.name]


def _as_operands(semantic: Any, left: Any, right: Any, *flags: bool, **named: bool) -> Any:
    """Of one type already, or beside a number, of which a block was made before."""
    if type(left) is not tl.tensor or not isinstance(semantic.builder, interpreter.InterpreterBuilder):
        return _operands(semantic, left, right, *flags, **named)
    if left.dtype.name in _PLAIN:
        if type(right) is tl.tensor and right.type.name == left.type.name:
            return left, right
        if type(right) in (int, float):
            key = left.type.name, repr(right), flags, *named.items()
            if key not in _numbers:
                same, block = _operands(semantic, left, right, *flags, **named)
                if same is not left or len(_numbers) == _MOST_NUMBERS:
                    return same, block
                _numbers[key] = block
            return left, _numbers[key]
    return _operands(semantic, left, right, *flags, **named)


def _unwrap_quickly(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind is tl.tensor or kind is int else _unwrap(value)


def _patch_member(
    owner: Any, name: str, member: Callable[..., Any], builder: Any, scope: interpreter._LangPatchScope
) -> None:
    """As the interpreter does, without its own test of what it passes."""
    if getattr(member, "__code__", None) is _CHECKED:
        member = member.__wrapped__  # type: ignore[attr-defined]

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **named)

    scope.set_attr(owner, name, call)


def _execute_alone(kernel: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
    with _turn:
        _execute(kernel, *args, **kwargs)


def install() -> None:
    """From now on, in this process."""
    tl.block_type.__init__ = _type_block
    tl.tensor.__init__ = _type_tensor
    interpreter._get_np_dtype = _numpy_dtype
    interpreter._convert_float = _convert_to_fp8
    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang = _patch_once
    interpreter.GridExecutor.__call__ = _execute_alone
    interpreter.InterpreterBuilder.create_fma = _multiply_and_add
    interpreter._patch_attr = _patch_member
    TritonSemantic.binary_op_type_checking_impl = _as_operands
    tl.core._unwrap_if_constexpr = _unwrap_quickly
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
