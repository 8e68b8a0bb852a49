"""Writes a model's folder anew, its matrices in another format: tensor by tensor, config.json last.

Left as they are: embeddings, output heads, norms, routers, what only reads images, and all that is no matrix:
experts that are stored together, in one tensor, too.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from eyas.common.errors import ConfigError, EyasError
from eyas.engine.checkpoint.folder import check_whole, read_config, weight_files
from eyas.engine.checkpoint.quantized import QUANTIZED
from eyas.quantize.formats import WrittenFormat, written_format
from eyas.quantize.tensor_file import TensorFile

_LEFT_OUT = re.compile(
    r"lm_head|head|.*embed.*|wte|wpe|.*norm.*|gate|shared_expert_gate|router|visual|vision.*|.*projector"
)
"""The parts of names, between dots, of modules that stay as they are."""

_FLOATS = ("F32", "F16", "BF16")
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
_INDEX = "model.safetensors.index.json"
_LONGEST_END = "weight_packed"
_PARTS = 4  # of a matrix, at most


@dataclass
class Written:
    """The work done: where each tensor is, its bytes before and after, and the matrices of either kind.
    `stacked`: tensors of many matrices, which stay as they are.
    """

    files: dict[str, str] = field(default_factory=dict)
    before: int = 0
    after: int = 0
    quantized: int = 0
    left_out: list[str] = field(default_factory=list)
    stacked: int = 0

    def add(self, file: str, name: str, tensor: torch.Tensor) -> None:
        """A tensor that is in that file."""
        self.files[name] = file
        self.after += tensor.nbytes


def quantize(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises ConfigError for a folder that it cannot take, and
    EyasError for a disk that does not take what is written: nothing is left then.
    """
    folder, out = args.folder, args.out
    raw = _checked(folder)
    form = written_format(args.format, args.group_size)
    _make(out)
    try:
        written = _write(folder, out, form)
        if not written.quantized:
            raise ConfigError(f"{folder} has no matrix that {args.format} can hold")
        _write_beside(folder, out, written)
        described = {"quantization_config": form.described(written.left_out)}
        (out / "config.json").write_text(json.dumps(raw | described, indent=2) + "\n")
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise EyasError(f"--out: {out} could not be written: {error}") from error
        raise
    stacked = f", {written.stacked} tensors of several matrices" if written.stacked else ""
    print(
        f"{out}: {written.quantized} matrices in {args.format}, {len(written.left_out)}{stacked} as they "
        f"were; {written.after / 1e6:,.0f} of {written.before / 1e6:,.0f} MB"
    )
    return 0


def _checked(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    raw = read_config(folder)
    if quantized := next((name for name in QUANTIZED if raw.get(name)), None):
        raise ConfigError(f"{folder} is quantized already: its config.json has a {quantized}")
    check_whole(folder)
    return raw


def _make(out: Path) -> None:
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(f"--out: {out} is there already, and is no empty folder", param="out")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made: {error.strerror}", param="out") from None


def _write(folder: Path, out: Path, form: WrittenFormat) -> Written:
    written = Written()
    with ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in weight_files(folder)}
        screen = Console(stderr=True)
        progress = stack.enter_context(
            Progress(console=screen, disable=not sys.stderr.isatty(), transient=True)
        )
        task = progress.add_task(
            f"quantizing {folder.name}", total=sum(len(file.keys()) for file in files.values())
        )
        for number, file in enumerate(files.values(), 1):
            name = (
                "model.safetensors"
                if len(files) == 1
                else f"model-{number:05}-of-{len(files):05}.safetensors"
            )
            names = [each + _LONGEST_END for each in file.keys() for _ in range(_PARTS)]  # noqa: SIM118 (not a dict)
            with TensorFile(out / name, names) as target:
                for stored in file.keys():  # noqa: SIM118 (not a dict)
                    for made, tensor in _made(folder, file, stored, form, written):
                        target.add(made, tensor)
                        written.add(name, made, tensor)
                    progress.advance(task)
    return written


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None


def _made(
    folder: Path, file: Any, name: str, form: WrittenFormat, written: Written
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a stored one becomes."""
    tensor = file.get_tensor(name)
    module = name.removesuffix(".weight")
    written.before += tensor.nbytes
    written.stacked += tensor.dim() == 3 and not any(map(_LEFT_OUT.fullmatch, module.split(".")))
    if module == name or tensor.dim() != 2 or file.get_slice(name).get_dtype() not in _FLOATS:
        yield name, tensor
    elif any(map(_LEFT_OUT.fullmatch, module.split("."))) or not form.holds(*tensor.shape):
        written.left_out.append(module)
        yield name, tensor
    elif not tensor.isfinite().all():
        raise ConfigError(f"tensor {name} of {folder} holds NaN or infinity")
    else:
        written.quantized += 1
        for end, part in form.stored(tensor).items():
            yield f"{module}.{end}", part


def _write_beside(folder: Path, out: Path, written: Written) -> None:
    """The index, if there are several files, and what else a server reads: tokenizer, templates, defaults."""
    for path in folder.iterdir():
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _BESIDE):
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name)
    if len(set(written.files.values())) > 1:
        index = {"metadata": {"total_size": written.after}, "weight_map": written.files}
        (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
