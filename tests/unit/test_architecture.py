"""The shape of the code: its size, what loads torch, who reads the environment, who touches stubs."""

from __future__ import annotations

import ast
import functools
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shape import unsearched

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("eyas", "gateway", "prefill_svc", "decode_svc", "draft_svc", "kv_transfer")
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
STUB_USERS = (
    "eyas/common/",
    "eyas/client/",
    "prefill_svc/",
    "decode_svc/",
    "draft_svc/",
    "gateway/grpc/control.py",
    "gateway/grpc/front.py",
    "gateway/grpc/messages.py",
    "gateway/grpc/weights.py",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module", autouse=True)
def _parse_once() -> Iterator[None]:
    """All these tests read the same trees, and no later test needs them."""
    yield
    for known in (parsed, functions, imported):
        known.cache_clear()


@functools.cache
def parsed(folder: str) -> list[tuple[str, ast.Module, str]]:
    """Name, tree and text of each file."""
    texts = {path: path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
    with unsearched():
        return [(path.relative_to(ROOT).as_posix(), ast.parse(text), text) for path, text in texts.items()]


def sources(*folders: str) -> Iterator[tuple[str, ast.Module, str]]:
    return itertools.chain.from_iterable(map(parsed, folders))


@functools.cache
def functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def parameters(function: Function) -> int:
    """How many things a caller has to know: everything but self and cls."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_files_are_short() -> None:
    sizes = {name: text.count("\n") for name, _, text in sources(*PACKAGES, "tests", "tools")}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    sizes = {
        f"{name}:{function.lineno} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, tree, _ in sources(*PACKAGES, "tests", "tools")
        for function in functions(tree)
    }
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def is_kernel(function: Function) -> bool:
    """A Triton kernel has no nouns: its parameters are addresses and sizes, as its launch lays them out."""
    told = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any("triton.jit" in each or each.split("(")[0] == "kernel" for each in told)


def test_parameters_are_few() -> None:
    counts = {
        f"{name}:{function.lineno} {function.name}": parameters(function)
        for name, tree, _ in sources(*PACKAGES, "tests", "tools")
        for function in functions(tree)
        if not is_kernel(function)
    }
    assert {name: count for name, count in counts.items() if count > MAX_PARAMETERS} == {}


def test_no_two_test_files_have_one_name() -> None:
    """Pytest collects all of them into one process, where each is a module of its bare name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert names and [name for name, count in names.items() if count > 1] == []


def test_no_test_file_imports_another() -> None:
    """What two test files share is in a module that says what it holds."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree, _ in sources("tests", "tools")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in [getattr(node, "module", None) or "", *[each.name for each in node.names]]
        if module.rpartition(".")[2].startswith("test_")
    ]
    assert found == []


def test_every_file_says_what_it_knows() -> None:
    silent = [name for name, tree, _ in sources(*PACKAGES) if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def test_no_mixins() -> None:
    mixins = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree, _ in sources(*PACKAGES)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Mixin")
    ]
    assert mixins == []


SPEAKERS = (
    "eyas/common/wire/clients.py",
    "eyas/common/wire/message.py",
    "eyas/common/wire/rpc.py",
    "eyas/common/wire/transfer.py",
    "eyas/engine/ipc/messages.py",
    "eyas/engine/ipc/transfer_messages.py",
    "gateway/backends/base.py",
    "gateway/backends/legs.py",
    "kv_transfer/puller.py",
)


def test_what_processes_say_has_one_definition_per_name() -> None:
    names = [
        node.name
        for speaker in SPEAKERS
        for node in ast.parse((ROOT / speaker).read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert names and [name for name, count in Counter(names).items() if count > 1] == []


MAY_READ_THE_ENVIRONMENT = (
    "eyas/common/security/api_keys.py",
    "eyas/common/security/secret_urls.py",
    "eyas/common/machine/folders.py",
    "eyas/cli.py",  # gRPC is told in no other way to be silent
    "eyas/common/machine/gpus.py",  # CUDA is told in no other way which GPUs a process may see
    "gateway/observe/tracing.py",  # where OpenTelemetry is told by its own variables
    "eyas/common/machine/processes.py",  # processes of multiprocessing are told in no other way how to import
    "eyas/engine/kernels/launch/warm.py",  # Triton is told in no other way where to keep its kernels
    "eyas/engine/loading/arithmetic.py",  # nor cuBLAS that it must not split k
    "eyas/engine/attention/flashinfer_backend.py",  # nor flashinfer how to call its compilers
)


def test_few_read_the_environment() -> None:
    readers = [
        name
        for name, tree, _ in sources(*PACKAGES)
        if name not in MAY_READ_THE_ENVIRONMENT
        and any(isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv") for n in ast.walk(tree))
    ]
    assert readers == []


@functools.cache
def imported(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_stubs_stay_at_the_edge() -> None:
    users = [
        name
        for name, tree, _ in sources(*PACKAGES)
        if not name.startswith(STUB_USERS) and any("_pb2" in module for module in imported(tree))
    ]
    assert users == []


TORCH_FREE = (
    "gateway",
    "eyas.common",
    "eyas.client",
    "prefill_svc",
    "decode_svc",
    "draft_svc",
    "kv_transfer",
    "eyas.engine.ipc.messages",
    "eyas.engine.scheduling.scheduler",
    "eyas.engine.loading.startup",
    "eyas.planning",
    "eyas.simulator",
    "eyas.cluster.serve",
    "gateway.main",
    "eyas.worker.worker",
    "eyas.cli",
)
LOAD_ALL = """
import importlib, pkgutil, sys
module = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(found.name)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("module", TORCH_FREE)
def test_loads_without_torch(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, module], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_families_stand_in_their_own_files_and_in_a_table() -> None:
    """Only its own file knows what is special about a model or a head; no other module imports it."""
    from eyas.engine.models.heads import HEADS
    from eyas.engine.models.table import MODELS

    special = tuple(f"eyas.engine.models.{name}." for name in (*MODELS.values(), *HEADS))
    importing, naming = [], []
    for name, tree, text in sources(*PACKAGES):
        if name.startswith("eyas/engine/models/"):
            continue
        if any(f"{module}.".startswith(special) for module in imported(tree)):
            importing.append(name)
        if name.startswith("eyas/engine/") and any(architecture in text for architecture in MODELS):
            naming.append(name)
    assert (importing, naming) == ([], [])
