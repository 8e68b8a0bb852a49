"""Writes a model's folder anew, its matrices in another format: tensor by tensor, config.json last.

Left as they are: embeddings, output heads, norms, routers, what only reads images, and all that is no matrix:
experts that are stored together, in one tensor, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
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
from eyas.quantize.calibration import Calibration
from eyas.quantize.flags import GROUP, GROUPED, SEARCHED
from eyas.quantize.formats import WrittenFormat, written_format
from eyas.quantize.tensor_file import TensorFile
from eyas.quantize.written import Written, is_left_out, stays

_FLOATS = ("F32", "F16", "BF16")
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
_INDEX = "model.safetensors.index.json"
_LONGEST_END = "weight_packed"
_PARTS = 4  # of a matrix, at most


def quantize(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises ConfigError for a folder that it cannot take, and
    EyasError for a disk that does not take what is written: nothing is left then.
    """
    folder, out, group = args.folder, args.out, args.group_size or GROUP
    _check_flags(args)
    raw = _checked(folder)
    text = args.calibration and Calibration.by(args.calibration, folder, args.format, group)
    _make(out)
    try:
        written, described = text.write(folder, out) if text else _write(folder, out, args.format, group)
        _write_beside(folder, out, written)
        config = raw | {"quantization_config": described}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
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


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError, by name, for a flag that means nothing for the format."""
    given = {"group-size": (args.group_size, GROUPED), "calibration": (args.calibration, SEARCHED)}
    for flag, (value, formats) in given.items():
        if value is not None and args.format not in formats:
            name = flag.replace("-", "_")
            raise ConfigError(f"--{flag}: is of {' and '.join(formats)}, not of {args.format}", param=name)


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


def _write(folder: Path, out: Path, name: str, group: int) -> tuple[Written, dict[str, Any]]:
    """Writes the weights, rounded; what they are, and their `quantization_config`."""
    form = written_format(name, group)
    written = _rounded(folder, out, form)
    if not written.quantized:
        raise ConfigError(f"{folder} has no matrix that {name} can hold")
    return written, form.described(written.left_out)


def _rounded(folder: Path, out: Path, form: WrittenFormat) -> Written:
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
            names = [each + _LONGEST_END for each in file.keys() for _ in range(_PARTS)]
            with TensorFile(out / name, names) as target:
                for stored in file.keys():
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
    written.stacked += tensor.dim() == 3 and not is_left_out(module)
    if module == name or tensor.dim() != 2 or file.get_slice(name).get_dtype() not in _FLOATS:
        yield name, tensor
    elif stays(module, tensor.shape, form):
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
