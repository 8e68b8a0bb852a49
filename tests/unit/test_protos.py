"""The protos are a contract: named by one rule (STANDARD of buf), explained to the last field."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from eyas.common import errors
from eyas.common.wire import rpc

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = "protos/eyas.proto"
PASCAL = re.compile(r"([A-Z][a-z0-9]+)+")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

Place = tuple[int, ...]  # a path of SourceCodeInfo: field numbers and indices of descriptor.proto


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """What protoc understands of every .proto, with its comments."""
    out = tmp_path_factory.mktemp("protos") / "all.binpb"
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    options = ["-I.", f"--descriptor_set_out={out}", "--include_source_info"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *options, *protos], cwd=ROOT, check=True, timeout=60
    )
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def messages(file: FileDescriptorProto) -> Iterator[tuple[Place, DescriptorProto]]:
    """All messages but the entries of maps, which have no text of their own."""

    def below(place: Place, message: DescriptorProto) -> Iterator[tuple[Place, DescriptorProto]]:
        yield place, message
        for i, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from below((*place, 3, i), nested)

    for i, message in enumerate(file.message_type):
        yield from below((4, i), message)


def enums(file: FileDescriptorProto) -> Iterator[tuple[Place, EnumDescriptorProto]]:
    for i, enum in enumerate(file.enum_type):
        yield (5, i), enum
    for place, message in messages(file):
        for i, enum in enumerate(message.enum_type):
            yield (*place, 4, i), enum


def places(file: FileDescriptorProto) -> Iterator[tuple[Place, str]]:
    """Everything that needs a comment, by its name."""
    yield (2,), file.package
    for i, service in enumerate(file.service):
        yield (6, i), service.name
        for j, method in enumerate(service.method):
            yield (6, i, 2, j), f"{service.name}.{method.name}"
    for place, message in messages(file):
        yield place, message.name
        for j, field in enumerate(message.field):
            yield (*place, 2, j), f"{message.name}.{field.name}"
        for j, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # that of an optional field
                yield (*place, 8, j), f"{message.name}.{oneof.name}"
    for place, enum in enums(file):
        yield place, enum.name
        for j, value in enumerate(enum.value):
            yield (*place, 2, j), f"{enum.name}.{value.name}"


def test_everything_is_explained(files: list[FileDescriptorProto]) -> None:
    silent = []
    for file in files:
        said = {tuple(at.path) for at in file.source_code_info.location if at.leading_comments.strip()}
        said |= {(2,) for at in file.source_code_info.location if at.leading_detached_comments}
        said |= {
            (2,) for at in file.source_code_info.location if tuple(at.path) == (12,) and at.leading_comments
        }
        silent += [f"{file.name}: {name}" for place, name in places(file) if place not in said]
    assert silent == []


def test_names_follow_one_rule(files: list[FileDescriptorProto]) -> None:
    wrong = []
    for file in files:
        for _, message in messages(file):
            wrong += [] if PASCAL.fullmatch(message.name) else [message.name]
            names = [field.name for field in message.field]
            wrong += [f"{message.name}.{name}" for name in names if not SNAKE.fullmatch(name)]
        for _, enum in enums(file):
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
            first, *others = [(value.name, value.number) for value in enum.value]
            wrong += [] if first == (f"{prefix}UNSPECIFIED", 0) else [f"{enum.name}: {first}"]
            wrong += [
                name for name, _ in others if not re.fullmatch(prefix + r"[A-Z0-9]+(_[A-Z0-9]+)*", name)
            ]
    assert wrong == []


def test_every_rpc_has_messages_of_its_own(files: list[FileDescriptorProto]) -> None:
    used: list[str] = []
    for file in files:
        for service in file.service:
            assert service.name.endswith("Service") or (file.name, service.name) == (PUBLIC, "Eyas")
            for method in service.method:
                for kind, type_name in ("Request", method.input_type), ("Response", method.output_type):
                    names = {f"{method.name}{kind}", f"{service.name}{method.name}{kind}"}
                    assert type_name.rpartition(".")[2] in names, (service.name, method.name)
                    used.append(type_name)
    assert len(used) == len(set(used)) > 0


def test_the_public_contract_stands_alone(files: list[FileDescriptorProto]) -> None:
    packages = {file.name: file.package for file in files}
    assert packages.pop(PUBLIC) == "eyas.v1" and set(packages.values()) == {"eyas.internal.v1"}
    (public,) = (file for file in files if file.name == PUBLIC)
    assert list(public.dependency) == []
    assert [service.name for service in public.service] == ["Eyas"]
    used = {type_name for _, message in messages(public) for type_name in types_of(message)}
    used |= {name for s in public.service for m in s.method for name in (m.input_type, m.output_type)}
    defined = {f".eyas.v1.{item.name}" for item in (*public.message_type, *public.enum_type)}
    assert defined == {name for name in used if name.count(".") == 3}, "only what the service needs"


def types_of(message: DescriptorProto) -> Iterator[str]:
    return (field.type_name for field in message.field if field.type_name)


def test_the_public_contract_names_all_metadata_and_errors() -> None:
    header = (ROOT / PUBLIC).read_text().partition("syntax")[0]
    keys = {"authorization", rpc.SYNTHETIC, rpc.CODE, rpc.PARAM}
    assert set(re.findall(r"^//   (authorization|eyas-[a-z]+)\b", header, re.M)) == keys
    codes = {cls.code: cls.grpc_status for cls in errors._tree(errors.EyasError)}
    table = re.sub(r"\n//\s{20,}", " ", header)
    told = {
        code: status
        for status, line in re.findall(r"^//   ([A-Z_]+)\s+(.*)", table, re.M)
        for code in re.findall(r"[a-z]+(?:_[a-z]+)+|overloaded|unavailable|cancelled|forbidden|busy", line)
    }
    assert told == codes


def test_what_pages_mean_is_called_a_layout_hash(files: list[FileDescriptorProto]) -> None:
    fields = {field.name for file in files for _, message in messages(file) for field in message.field}
    assert "layout_hash" in fields and "meaning" not in fields
