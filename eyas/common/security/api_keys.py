"""API keys: the file of their digests, and plain ones, which reach child processes never as an argument.

The file has a line per key, with its caller's name and the SHA-256 of the key.

    alice sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08     # lines that begin with
# are comments

A key itself stands nowhere. SHA-256 without salt and stretching is enough because `new_key` draws 256 bits:
nothing shorter than trying all of them leads from a line back to its key. Every user of a machine can read a
process's arguments, but not its environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import ConfigError

MOST_BYTES = 1 << 20  # of a file: about ten thousand keys
PREFIX = "eyas-"  # of keys made here, so that people and scanners of source code know one when they see it
SHORTEST = 20  # characters of a key that a person brings
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SHAPE = "a line is NAME sha256:HEX, as `eyas keys add` writes it"
VARIABLE = "EYAS_API_KEY"


@dataclass(frozen=True)
class ApiKey:
    """One valid key: the name of its caller, and its SHA-256 in hex."""

    name: str
    digest: str

    @property
    def line(self) -> str:
        """How a file says it."""
        return f"{self.name} sha256:{self.digest}"


def digest_of(key: str) -> str:
    """The SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def is_key(text: str) -> bool:
    """Whether an HTTP header can carry it: printable ASCII without spaces."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def read(path: str) -> tuple[ApiKey, ...]:
    """The keys in a file; () if it has none. Raises ConfigError, which names the file and the line."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _wrong(path, "cannot be read: it is not UTF-8") from error
    if len(raw) > MOST_BYTES:
        raise _wrong(path, f"has more than {MOST_BYTES} bytes")
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = _parsed(path, number, line)
        if key.name in keys:
            raise _wrong(path, f"line {number}: the name {key.name} is there twice")
        keys[key.name] = key
    return tuple(keys.values())


def _parsed(path: str, number: int, line: str) -> ApiKey:
    """The key of one line. What the line says is never repeated: it may be a key by mistake."""
    words = line.split()
    if len(words) != 2 or not _NAME.fullmatch(words[0]):
        raise _wrong(path, f"line {number}: {_SHAPE}")
    digest = _DIGEST.fullmatch(words[1])
    if digest is None:
        raise _wrong(path, f"line {number}: {words[0]} has no SHA-256 of 64 lower-case digits; {_SHAPE}")
    return ApiKey(words[0], digest[1])


def _wrong(path: str, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}")


def add(path: str, name: str, key: str) -> None:
    """Adds a key to a file, which is made if there is none. Raises ConfigError for a name that is taken."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name: letters, digits and . _ -, at most 64", param="name")
    if not is_key(key) or len(key) < SHORTEST:
        raise ConfigError(f"a key is printable ASCII without spaces, {SHORTEST} characters or more")
    with _alone(path):
        known = read(path) if os.path.exists(path) else ()
        if any(one.name == name for one in known):
            taken = f"{path} has a key of {name}: remove it first, or take another name"
            raise ConfigError(taken, param="name")
        lines = _lines(path) if os.path.exists(path) else []
        _replace(path, [*lines, ApiKey(name, digest_of(key)).line])


def remove(path: str, name: str) -> None:
    """Removes a key from a file; comments stay. Raises ConfigError if it has no key of this name."""
    with _alone(path):
        if all(key.name != name for key in read(path)):
            raise ConfigError(f"{path} has no key of {name!r}", param="name")
        _replace(path, [line for line in _lines(path) if line.split()[:1] != [name]])


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """One process at a time changes the files of a folder: what another has added is read before it is kept.

    The folder is locked, since the file itself is replaced.
    """
    try:
        folder = os.open(Path(path).resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise _wrong(path, f"cannot be written: {error}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _replace(path: str, lines: Sequence[str]) -> None:
    """Writes the whole file beside its old self and puts it in its place: no reader ever sees half of it.

    Raises ConfigError if that fails.
    """
    try:
        _written(Path(path).resolve(), "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _written(target: Path, text: str) -> None:
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=".eyas-keys-")  # for its owner alone
    try:
        with open(handle, "w") as file:
            file.write(text)
        if target.exists():
            os.chmod(beside, target.stat().st_mode & 0o777)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def from_environment() -> tuple[str, ...]:
    """The keys in EYAS_API_KEY, one per line; () if it is not set or empty."""
    text = os.environ.get(VARIABLE, "")
    return parse(text, VARIABLE) if text.strip() else ()


def environment(keys: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment for a child that gets `keys` and no others."""
    left = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return left | ({VARIABLE: "\n".join(keys)} if keys else {})


def parse(text: str, source: str) -> tuple[str, ...]:
    """The keys in `text`, one per line; empty lines and lines that begin with # are skipped.

    Raises ConfigError, naming `source`, if there is no key or one that an HTTP header cannot carry.
    """
    flag = source.removeprefix("--")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    keys = {line: number for number, line in lines if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(
            f"{source}: there is no key in it (lines that begin with # do not count)", param=flag
        )
    for key, number in keys.items():
        if not is_key(key):
            problem = f"line {number} is not a key: a key is printable ASCII without spaces"
            raise ConfigError(f"{source}: {problem}", param=flag)
    return tuple(keys)
