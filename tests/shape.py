"""The shape of the code, measured on its syntax trees: `python -m tests.shape` prints docs/shape.md.

It knows files, functions, classes, imports and docstrings, and imports nothing that it measures; `tests.hops`
runs it. The limits are in `tests/unit/test_architecture.py` and `tests/unit/test_shape.py`.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hops import Hops

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = ("decode_svc", "draft_svc", "eyas", "gateway", "kv_transfer", "prefill_svc")
FOLDERS = (*INSTALLED, "tests", "tools")
SHORT_LINES = 100  # of a module that may be a fragment of another
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")  # of a class name
FEWEST_STATEMENTS = 6  # of a function body that counts as a duplicate
UNSAID = "Missing associated documentation comment"  # what protoc writes where the .proto has no comment

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, its text and its syntax tree."""

    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The row of the table that it belongs to: `gateway`, `eyas.engine`."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if parts[0] == "eyas" and len(parts) > 2 else parts[0]

    @property
    def lines(self) -> int:
        """Of the file."""
        return self.text.count("\n")

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        """Every class, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


@dataclass(frozen=True)
class Definition:
    """One module, class, function or method that others may use; `name` is its dotted name in `module`."""

    module: str
    name: str
    kind: str
    documented: bool


def modules(*folders: str, root: Path = ROOT) -> list[Module]:
    """Every module below these folders of `root`, generated stubs left out unless `protos` is asked for."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    found = []
    with unsearched():
        for path in paths:
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            found.append(Module(name, text, ast.parse(text)))
    return found


@contextlib.contextmanager
def unsearched() -> Iterator[None]:
    """No search for garbage: millions of nodes come and none goes, so it would take most of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- sizes -----------------------------------------------------------------------------------------------


def function_lines(among: Iterable[Module]) -> list[int]:
    """The lines of every function, ascending."""
    return sorted(_lines(function) for module in among for function in module.functions())


def _lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def percentile(values: Sequence[int], share: float) -> int:
    """The value below which `share` of the ascending `values` lie; 0 if there are none."""
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0


def largest_class(among: Iterable[Module]) -> tuple[str, int, int]:
    """(name, lines, methods) of the class with the most lines."""
    sizes = [
        (_lines(node), sum(isinstance(part, Function) for part in node.body), f"{module.name}.{node.name}")
        for module in among
        for node in module.classes()
    ]
    lines, methods, name = max(sizes, default=(0, 0, "none"))
    return name, lines, methods


def one_word(among: Iterable[Module]) -> tuple[int, int]:
    """How many classes have a name of one word, and how many there are; private ones count."""
    names = [node.name for module in among for node in module.classes()]
    return sum(len(WORD.findall(name)) == 1 for name in names), len(names)


# --- imports ---------------------------------------------------------------------------------------------


def imports(among: Sequence[Module]) -> dict[str, set[str]]:
    """Which of these modules each of them imports, wherever in the file and for types alone as well."""
    names = {module.name for module in among}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for module in among:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                graph[module.name] |= {alias.name for alias in node.names} & names
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module.name] |= {full if full in names else str(node.module) for full in inner} & names
    return {name: imported - {name} for name, imported in graph.items()}


@dataclass(frozen=True)
class Fragments:
    """Modules that one other module alone imports: all, those in its folder, and the short ones of these."""

    modules: int
    beside: int
    short: int


def fragments(among: Sequence[Module]) -> Fragments:
    """Counts them. Packages' own files do not count."""
    importers: dict[str, list[str]] = defaultdict(list)
    for name, imported in imports(among).items():
        for other in imported:
            importers[other].append(name)
    single = [module for module in among if len(importers[module.name]) == 1]
    beside = [
        module
        for module in single
        if importers[module.name][0].rpartition(".")[0] == module.name.rpartition(".")[0]
    ]
    short = [module for module in beside if module.lines < SHORT_LINES]
    return Fragments(len(single), len(beside), len(short))


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import one another, directly or through others."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset({b for b in reached[a] if a in reached[b]}) for a in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen, waiting = {start}, [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


# --- duplicates ------------------------------------------------------------------------------------------


def duplicate_classes(among: Iterable[Module]) -> dict[str, list[str]]:
    """Class names that stand in several modules, without private ones."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in among:
        for node in module.classes():
            if not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def duplicate_bodies(among: Iterable[Module]) -> list[list[str]]:
    """Functions whose bodies are the same but for the names of their variables."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in among:
        for function in module.functions():
            body = function.body[1:] if ast.get_docstring(function) is not None else function.body
            statements = sum(isinstance(part, ast.stmt) for line in body for part in ast.walk(line))
            if statements >= FEWEST_STATEMENTS:
                places[_normalised(function, body)].append(f"{module.name}.{function.name}")
    return sorted(where for where in places.values() if len(where) > 1)


def _normalised(function: Function, body: Sequence[ast.stmt]) -> str:
    """The body's tree as text, its own variables numbered in the order in which they stand."""
    copy = ast.parse("\n".join(map(ast.unparse, body)))
    own = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    named = [node for node in ast.walk(copy) if isinstance(node, ast.Name)]
    own |= {node.id for node in named if isinstance(node.ctx, ast.Store)}
    numbers: dict[str, str] = {}
    for node in named:
        if node.id in own:
            node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
    return ast.dump(copy)


# --- docstrings ------------------------------------------------------------------------------------------


def definitions(among: Sequence[Module]) -> list[Definition]:
    """All that is public: no leading underscore, not in a function, no override of a documented method."""
    classes = {
        f"{module.name}.{node.name}": (module, node)
        for module in [*among, *modules("protos")]
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    found: list[Definition] = []
    for module in among:
        if module.tree.body:
            found.append(Definition(module.name, "", "module", ast.get_docstring(module.tree) is not None))
        found += _public(module, module.tree.body, "", classes)
    return found


Classes = Mapping[str, tuple[Module, ast.ClassDef]]


def _public(module: Module, body: Sequence[ast.stmt], inside: str, classes: Classes) -> Iterator[Definition]:
    owner = classes.get(f"{module.name}.{inside}")
    for node in body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        name = f"{inside}.{node.name}".removeprefix(".")
        said = ast.get_docstring(node) is not None
        if isinstance(node, ast.ClassDef):
            yield Definition(module.name, name, "class", said)
            yield from _public(module, node.body, name, classes)
        elif said or owner is None or not _inherits(owner, node.name, classes):
            yield Definition(module.name, name, "function" if owner is None else "method", said)


def _inherits(owner: tuple[Module, ast.ClassDef], method: str, classes: Classes) -> bool:
    """Whether a base class among `classes` documents the method."""
    for base in _bases(owner, classes):
        for node in base[1].body:
            if isinstance(node, Function) and node.name == method:
                said = ast.get_docstring(node) or UNSAID
                return UNSAID not in said
        if _inherits(base, method, classes):
            return True
    return False


def _bases(owner: tuple[Module, ast.ClassDef], classes: Classes) -> Iterator[tuple[Module, ast.ClassDef]]:
    module, node = owner
    imported = {
        alias.asname or alias.name: f"{statement.module}.{alias.name}"
        for statement in ast.walk(module.tree)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    for base in node.bases:
        first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
        name = imported.get(first, f"{module.name}.{first}") + (f".{rest}" if rest else "")
        if name in classes:
            yield classes[name]


def coverage(found: Sequence[Definition]) -> float:
    """The share of them that has a docstring."""
    return sum(definition.documented for definition in found) / len(found)


# --- the page --------------------------------------------------------------------------------------------

PAGE = """\
# The shape of the code

Measured on the syntax trees: `python -m tests.shape` prints this page. `tests/unit/test_shape.py` keeps
import cycles and class names of two things at none, and documentation at no less than this page says;
`tests/unit/test_architecture.py` bounds files (700 lines), functions (60 lines) and parameter lists (6).

{table}

* **files, lines, longest**: Python files without generated stubs, their lines, and those of the longest one.
* **functions**: their number, with methods and nested ones; then their lines: the median, the 90th and the
  99th percentile, and the longest.
* **largest class**: the class with the most lines, and how many methods it has.
* **public, documented**: modules, classes, functions and methods without a leading underscore, and the share
  of them with a docstring. Tests do not count, nor do overrides of methods that a base class documents.

**Class names of one word: {one_word}.** Private ones count.

**Modules with one importer: {single}.** {beside} of them are beside it in its folder, {short} of these have
less than {short_lines} lines.

**Hops of one chat: {hops}.** Streamed, in a split cluster with drafts on a CPU: what ran for it in any
process and does not run without it (`tests/hops.py`).

**Import cycles: {cycles}.** Modules that import one another, in any function and for types alone as well.

**Class names in several modules: {classes}.** The same public name for two things.{class_list}

**Duplicate functions: {bodies}.** Bodies of {fewest} statements or more that differ in the names of variables
at most.{body_list}
"""
COLUMNS = (
    *("", "files", "lines", "longest", "functions", "p50", "p90", "p99", "max"),
    *("largest class", "lines", "methods", "public", "documented"),
)


def page(chats: Sequence[Hops]) -> str:
    """docs/shape.md as it should be now. `chats`: what traced chats ran through."""
    found = modules(*FOLDERS)
    code = [module for module in found if module.package in INSTALLED or module.name.startswith("eyas.")]
    public = definitions(code)
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in found:
        packages[module.package].append(module)
    rows = [_row(name, packages[name], public) for name in sorted(packages)]
    rows.append(_row("what is installed", code, public))
    lines = [COLUMNS, ["---", *["--:"] * 8, "---", *["--:"] * 4], *rows]
    words, single = one_word(code), fragments(code)
    around, classes, bodies = cycles(imports(code)), duplicate_classes(code), duplicate_bodies(code)
    return PAGE.format(
        table="\n".join(f"| {' | '.join(cells)} |" for cells in lines),
        one_word=f"{words[0] / words[1]:.0%} of {words[1]:,}",
        single=f"{single.modules} of {len(code)}",
        beside=single.beside,
        short=single.short,
        short_lines=SHORT_LINES,
        hops="; ".join(map(_hops, chats)),
        cycles=_count(around),
        classes=_count(classes),
        class_list=_listed(f"`{name}`: {', '.join(where)}" for name, where in classes.items()),
        bodies=_count(bodies),
        body_list=_listed(", ".join(where) for where in bodies),
        fewest=FEWEST_STATEMENTS,
    )


def _row(name: str, among: Sequence[Module], public: Sequence[Definition]) -> list[str]:
    sizes = function_lines(among)
    largest, lines, methods = largest_class(among)
    names = {module.name for module in among}
    own = [definition for definition in public if definition.module in names]
    shown = f"{coverage(own):.0%}" if own else ""
    numbers = (len(among), sum(module.lines for module in among), max(module.lines for module in among))
    spread = (len(sizes), *(percentile(sizes, share) for share in (0.5, 0.9, 0.99)), max(sizes, default=0))
    cells = [f"{number:,}" for number in (*numbers, *spread)]
    tail = [f"`{largest.rpartition('.')[2]}`", str(lines), str(methods)] if lines else ["", "", ""]
    return [name, *cells, *tail, str(len(own)) if own else "", shown]


def _hops(chat: Hops) -> str:
    tokens = f"{chat.tokens} token{'s' if chat.tokens > 1 else ''}"
    return (
        f"{chat.files} files, {chat.functions:,} functions and {chat.calls:,} calls "
        f"in {chat.processes} processes for {tokens}"
    )


def _count(found: Mapping[str, object] | Sequence[object]) -> str:
    return str(len(found)) if found else "none"


def _listed(lines: Iterable[str]) -> str:
    found = "".join(f"\n* {line}" for line in lines)
    return f"\n{found}" if found else ""


if __name__ == "__main__":
    from tests.hops import measure

    print(page(measure()), end="")
