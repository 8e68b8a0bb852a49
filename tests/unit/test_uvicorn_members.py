"""Whatever the front door uses of uvicorn's private state is there, in the installed version."""

from __future__ import annotations

import ast
import asyncio
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tests.shape import ROOT

FOLDERS = ("eyas", "gateway")
PROTOCOL, CYCLE, FLOW, SERVER = "HttpToolsProtocol", "RequestResponseCycle", "FlowControl", "Server"
VALUES = {"self.cycle": CYCLE, "cycle": CYCLE, "self.flow": FLOW, "self._flow": FLOW}
"""How objects of uvicorn are called in the files that import it."""


@dataclass(frozen=True)
class Use:
    """A member of one of uvicorn's classes, and the line that uses it."""

    kind: str
    member: str
    place: str


def uses(name: str, text: str) -> Iterator[Use]:
    """Every member of uvicorn that a file uses: of its objects, and in subclasses those of a base class."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (kind := VALUES.get(ast.unparse(node.value))):
            yield Use(kind, node.attr, f"{name}:{node.lineno}")
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).removeprefix("uvicorn.") for base in node.bases}
            for kind in bases & {PROTOCOL, SERVER}:
                yield from inherited(kind, node, name)


def inherited(kind: str, subclass: ast.ClassDef, name: str) -> Iterator[Use]:
    """What a subclass calls by `super()`, and what it uses of `self` without defining it."""
    attributes = [node for node in ast.walk(subclass) if isinstance(node, ast.Attribute)]
    own = {
        node.name for node in ast.walk(subclass) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and node.attr.startswith("_")}
    for node in attributes:
        value = ast.unparse(node.value)
        if value == "super()" or (value == "self" and node.attr not in own):
            yield Use(kind, node.attr, f"{name}:{node.lineno}")


def used() -> list[Use]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    importing = {
        name: text for name, text in texts.items() if re.search(r"^(from|import) uvicorn", text, re.M)
    }
    return [use for name, text in importing.items() for use in uses(name, text)]


def missing(members: dict[str, set[str]], uses: list[Use]) -> list[str]:
    """A sentence for each use of a member that uvicorn does not have."""
    return [
        f"{use.place} uses {use.kind}.{use.member}, which uvicorn {uvicorn.__version__} does not have: "
        "rewrite it for this version, or bound uvicorn in pyproject.toml"
        for use in uses
        if use.member not in members[use.kind]
    ]


@pytest.fixture
async def members() -> dict[str, set[str]]:
    """What objects of each class have once they are made."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
    protocol = HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.on_message_begin()
    of_cycle: dict[str, Any] = dict.fromkeys(
        ("scope", "transport", "flow", "logger", "access_logger", "default_headers", "message_event")
    )
    flags = dict.fromkeys(("access_log", "expect_100_continue", "keep_alive"), False)
    cycle = RequestResponseCycle(**of_cycle, **flags, on_response=lambda: None)
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)  # as its `serve` does first
    made = {PROTOCOL: protocol, CYCLE: cycle, FLOW: FlowControl(None), SERVER: server}  # type: ignore[arg-type]
    return {kind: set(dir(thing)) for kind, thing in made.items()}


async def test_every_member_of_uvicorn_that_is_used_is_there(members: dict[str, set[str]]) -> None:
    found = used()
    assert {(use.kind, use.member) for use in found} >= {
        (PROTOCOL, "_unset_keepalive_if_required"),
        (PROTOCOL, "pipeline"),
        (PROTOCOL, "on_response_complete"),
        (CYCLE, "waiting_for_100_continue"),
        (CYCLE, "expected_content_length"),
        (FLOW, "drain"),
        (SERVER, "server_state"),
    }
    assert missing(members, found) == []


async def test_a_missing_member_is_named_with_the_line_that_uses_it(members: dict[str, set[str]]) -> None:
    members[PROTOCOL].remove("pipeline")
    sentences = missing(members, used())
    assert sentences
    for sentence in sentences:
        assert sentence.startswith("gateway/http/protocol.py:")
        assert f" uses {PROTOCOL}.pipeline, which uvicorn {uvicorn.__version__} does not have: " in sentence


def test_a_file_that_uses_a_private_member_is_read() -> None:
    text = """
class Own(HttpToolsProtocol):
    def connection_made(self, transport):
        super().connection_made(transport)
        self._mine = self._theirs
        self.cycle.body = b""
        self.helper()

    def helper(self): ...
"""
    found = {(use.kind, use.member) for use in uses("own.py", text)}
    assert found == {
        (PROTOCOL, "connection_made"),
        (PROTOCOL, "_theirs"),
        (PROTOCOL, "cycle"),
        (CYCLE, "body"),
    }


def test_uvicorn_has_an_upper_bound() -> None:
    """The next version may lack a member: it is tried before it is let in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "uvicorn")
    assert uvicorn.__version__ in requirement.specifier
    assert "99.0" not in requirement.specifier
