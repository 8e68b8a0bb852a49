"""A safetensors file that is written tensor by tensor: no more than one is in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ROOM = 256
"""Bytes of the header for a tensor, beside its name: dtype, shape, and where it is."""


class TensorFile:
    """A context manager. The header stands first; room is left for it, and it is written at the end."""

    def __init__(self, path: Path, names: list[str]) -> None:
        """`names`: at least as many, and as long, as the tensors that will be added."""
        self._room = -(-sum(len(json.dumps(name)) + _ROOM for name in names) // 8) * 8 + 64
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        self._file.seek(8 + self._room)
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor behind the others."""
        begin, self._end = self._end, self._end + tensor.nbytes
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        self._entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, self._end]}
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                header = json.dumps(self._entries, separators=(",", ":")).encode()
                self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
