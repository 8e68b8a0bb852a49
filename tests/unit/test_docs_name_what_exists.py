"""Every path, module, symbol, `make` target, `eyas` command and flag that the documentation names exists.

It reads inline code and code blocks of README.md, CONTRIBUTING.md and docs/. CHANGELOG.md is left out: it is
history, and rightly names what is gone.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Iterator

import pytest

from eyas import cli
from eyas.commands import CommandParser
from eyas.peers.table import BY_NAME
from tests import shape

ROOT = shape.ROOT
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
)
PACKAGES = (*shape.FOLDERS, "protos")
SUFFIXES = (".py", ".proto", ".md", ".toml", ".yaml", ".yml")
PLACEHOLDER = "NAME"  # in the paths of files that a reader is to write
DATA = (".json", ".safetensors", ".jinja")  # of a model's folder
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


@pytest.fixture(scope="module", autouse=True)
def _trees_of_this_file_alone() -> Iterator[None]:
    """Later tests need none of them, and would search them for garbage."""
    yield
    trees.cache_clear()


def problems(text: str, folder: str = "") -> list[str]:
    """What a page in `folder` names that does not exist, each as a sentence. Links are relative to it."""
    blocks = BLOCK.findall(text)
    spans = [span.replace("\\|", "|") for span in CODE.findall(BLOCK.sub("", text))]
    lines = [line for block in blocks for line in block.splitlines()[1:-1]]
    found = [
        f"{target} is linked, but no such file exists"
        for target in LINK.findall(text)
        if gone(folder + target)
    ]
    for line in lines:
        if folder := re.match(r"(\w+(?:/\w+)*/)  ", line):
            found += [f"{folder[1]} does not exist"] if gone(folder[1]) else []
        found += commands(line)
    for span in spans:
        found += commands(span)
        found += [problem for word in re.split(r"[\s|]+", span) for problem in names(word.strip(",;:()"))]
    return list(dict.fromkeys(found))


def gone(path: str) -> bool:
    """Whether nothing has this path; NAME in it stands for a name that the reader chooses."""
    path = path.replace("NAME", "*")
    return not any(ROOT.glob(path)) if "*" in path else not (ROOT / path).exists()


# --- names -------------------------------------------------------------------------------------------------


def names(word: str) -> Iterator[str]:
    """What is wrong with one word of inline code, if it is a path, a module or a symbol."""
    path, _, symbol = word.partition("::")
    first = re.split(r"[/.]", word)[0]
    if PLACEHOLDER in word:
        return
    if symbol:
        if gone(path) or not defines(module_of(path), symbol):
            yield f"{word}: {path} does not define {symbol}"
    elif "/" in word and not word.startswith(("/", ".venv/")):
        if (word.endswith(SUFFIXES) or first in PACKAGES) and gone(word):
            yield f"{word} does not exist"
    elif re.fullmatch(r"\w+\.(?:py|proto)", word):
        if word not in file_names():
            yield f"{word}: no file has this name"
    elif DOTTED.fullmatch(word) and not word.endswith(SUFFIXES + DATA):
        if first in PACKAGES:
            yield from unresolved(word)
        elif unknown := unknown_symbol(*word.split(".")[:2]):
            yield f"{word}: {unknown}"


def unknown_symbol(owner: str, symbol: str) -> str:
    """Why `module.Symbol` or `Class.attribute` does not exist; `model.layers` may be a variable."""
    known = symbols_by_owner().get(owner)
    if known is None or symbol in known or (owner + symbol).islower():
        return ""
    return f"{owner} has no {symbol}"


def unresolved(dotted: str) -> list[str]:
    return [] if resolves(dotted) else [f"{dotted}: there is no such module or symbol"]


def resolves(dotted: str) -> bool:
    """Whether it is a module, a symbol of one, or a package or symbol of the protos."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        name, rest = ".".join(parts[:end]), ".".join(parts[end:])
        if name in proto_names():
            return not rest or name + "." + rest in proto_names()
        if name in trees() or (ROOT / name.replace(".", "/")).is_dir():
            return not rest or defines(name, rest)
    return False


def defines(module: str, symbol: str) -> bool:
    """Whether a module defines `symbol`, which may be a class's attribute."""
    body = trees()[module].body if module in trees() else []
    for name in symbol.removesuffix("()").split("."):
        found = [node for node in body if name in bound(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement gives a value."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def file_names() -> set[str]:
    return {path.name for folder in PACKAGES for path in (ROOT / folder).rglob("*.*")}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {module.name: module.tree for module in shape.modules(*PACKAGES)}


@functools.cache
def symbols_by_owner() -> dict[str, set[str]]:
    """By last name of a module or by class name: the names that it defines, over all of that name."""
    found: dict[str, set[str]] = {}
    code = {name: tree for name, tree in trees().items() if not name.startswith("tests")}
    for name, tree in code.items():
        found.setdefault(name.rpartition(".")[2], set()).update(*map(bound, tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {part for inner in node.body for part in bound(inner)}
                set_here = {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                }
                found.setdefault(node.name, set()).update(methods, set_here)
    for name in proto_names():
        owner, _, symbol = name.rpartition(".")
        found.setdefault(owner.rpartition(".")[2], set()).add(symbol)
    return found


@functools.cache
def proto_names() -> set[str]:
    """Packages, services and their methods, messages and enums, with the package in front."""
    found: set[str] = set()
    for path in (ROOT / "protos").glob("*.proto"):
        text = path.read_text()
        package = re.search(r"^package ([\w.]+);", text, re.MULTILINE)
        assert package is not None, path
        found.add(package[1])
        for name in re.findall(r"^(?:message|enum|service) (\w+)", text, re.MULTILINE):
            found.add(f"{package[1]}.{name}")
        for service, body in re.findall(r"^service (\w+) \{(.*?)^\}", text, re.MULTILINE | re.DOTALL):
            found |= {
                f"{package[1]}.{service}.{rpc}" for rpc in re.findall(r"^\s*rpc (\w+)", body, re.MULTILINE)
            }
    return found


# --- commands ----------------------------------------------------------------------------------------------


def commands(line: str) -> Iterator[str]:
    """What is wrong with the `make` targets, `eyas` commands, modules and flags of a line."""
    line = line.partition("  #")[0]
    for target in re.findall(r"^make ([a-z-]+)", line):
        if not re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
            yield f"make {target}: the Makefile has no such target"
    known = all_flags()
    if command := re.match(r"(?:\.venv/bin/)?eyas ([a-z]+)", line):
        if command[1] not in eyas_flags():
            yield f"eyas {command[1]}: there is no such command"
            return
        known = eyas_flags()[command[1]]
    elif module := re.match(r"python -m ([\w.]+)", line):
        if module[1].startswith(PACKAGES):
            yield from unresolved(module[1])
        known = program_flags()
    elif not line.startswith("--"):
        return
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line):
        if flag not in known:
            yield f"{flag}: there is no such flag in `{line.strip()}`"


@functools.cache
def eyas_flags() -> dict[str, set[str]]:
    """The flags of every `eyas` command, those of its own commands included."""

    def flags(parser: CommandParser) -> set[str]:
        parser.complete()
        own = {flag for action in parser._actions for flag in action.option_strings}
        own |= set(BY_NAME) if parser.reader is not None else set()
        return own.union(*map(flags, commands(parser).values()))

    def commands(parser: CommandParser) -> dict[str, CommandParser]:
        choices = (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        return next(choices, {})

    return {name: flags(parser) for name, parser in commands(cli._parser()).items()}


@functools.cache
def all_flags() -> set[str]:
    return set().union(*eyas_flags().values(), program_flags())


@functools.cache
def program_flags() -> set[str]:
    """The flags of the programs that are run as modules."""
    calls = (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = (arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant))
    return {word for word in words if isinstance(word, str) and word.startswith("--")}


# --- the tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    folder, slash, _ = page.rpartition("/")
    assert problems((ROOT / page).read_text(), folder + slash) == []


@pytest.mark.parametrize(
    "planted",
    [
        "see `gateway/generator.py`",
        "see `gatway/generate.py`",
        "see `generator.py`",
        "see `eyas/engine/looop/`",
        "see `eyas.engine.looop`",
        "see `gateway.backends.generate.ClusterFrontend`",
        "see `gateway/backends/generate.py::ClusterFrontend`",
        "see `gateway/backends/generate.py::ClusterBackend.begin`",
        "see `generate.ClusterFrontend`",
        "see `ClusterBackend.begin`",
        "see `DecodeService.Sessions`",
        "see `eyas.v1.Iris`",
        "see [this](examples/sdk.py)",
        "run `make tests`",
        "run `eyas serv`",
        "run `eyas chat --layout split`",
        "run `python -m tests.chaoss`",
        "run `python -m tests.chaos --secondz 3`",
        "give `--num-pagez`",
        "```\nmake tests\n```",
        "```\neyas gateway --hosts 0.0.0.0\n```",
        "```\ngatway/       the gateway\n```",
    ],
)
def test_a_wrong_name_is_found(planted: str) -> None:
    assert len(problems(planted)) == 1


@pytest.mark.parametrize(
    "right",
    [
        "`gateway/backends/generate.py::ClusterBackend.start`, `OutputBuffer.take`",
        "`gateway.backends.generate.ClusterBackend`",
        "`eyas/engine/`, `router.route`, `DecodeService.Session`, `eyas.v1.Eyas`, `model.layers.0`",
        "`make test`, `eyas serve --num-pages 7`, `--tp 2`, `python -m tests.chaos --seconds 600`",
        "`config.json`, `torch.mm`, `/v1/completions`, `pip install 'eyas[gpu]'`, `*.safetensors`",
    ],
)
def test_a_right_name_is_no_problem(right: str) -> None:
    assert problems(right) == []
