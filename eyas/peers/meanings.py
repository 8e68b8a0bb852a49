"""The meanings of another server's flag here: the kinds of rows of `eyas.peers.table`.

Each kind is put into a sentence for docs/coming-from.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NONE, ONE, MANY, SWITCH = "none", "one", "many", "switch"
"""How many values a flag takes; a switch may have true or false."""

VLLM, SGLANG, BOTH = "vLLM", "SGLang", "both"
"""The servers with the flag."""

Knows = Callable[[str], bool]
"""Whether the command has a flag of its own."""

Convert = Callable[[str], str]
"""A flag's value there to the same value here. Raises ValueError, with a sentence, if there is none."""


@dataclass(frozen=True)
class FlagSetting:
    """One flag of Eyas with its values. `weak`: only if nothing else sets the same."""

    flag: str
    values: tuple[str, ...] = ()
    weak: bool = False


@dataclass(frozen=True)
class SameFlag:
    """A flag of Eyas has the same name and meaning."""

    convert: Convert | None = None
    note: str = ""

    def sentence(self) -> str:
        """Returns the flag's sentence on the page of flags."""
        return _with("the same", self.note)


@dataclass(frozen=True)
class AliasFlag:
    """A flag of Eyas has the same meaning under another name."""

    flag: str
    convert: Convert | None = None
    note: str = ""

    def sentence(self) -> str:
        """Returns the flag's sentence on the page of flags."""
        return _with(f"`{self.flag}`", self.note)


@dataclass(frozen=True)
class AcceptedFlag:
    """A flag for what Eyas does anyway, for the reason `why`: accepted, and changes nothing."""

    why: str

    def sentence(self) -> str:
        """Returns the flag's sentence on the page of flags."""
        return f"accepted, changes nothing: {self.why}"


@dataclass(frozen=True)
class AcceptedValues:
    """A flag that is accepted with one of `values`; else refused, and `instead` says what to do."""

    values: tuple[str, ...]
    why: str
    instead: str

    def sentence(self) -> str:
        """Returns the flag's sentence on the page of flags."""
        values = " or ".join(f"`{value}`" for value in self.values)
        return f"{values}: changes nothing ({self.why}); else refused: {self.instead}"


@dataclass(frozen=True)
class AcceptedWith:
    """A flag that is accepted where one of the flags of Eyas `flags` is given; else refused."""

    flags: tuple[str, ...]
    why: str
    instead: str

    def sentence(self) -> str:
        """Returns the flag's sentence on the page of flags."""
        given = " or ".join(f"`{flag}`" for flag in self.flags)
        return f"with {given}: changes nothing ({self.why}); else refused: {self.instead}"


@dataclass(frozen=True)
class RefusedFlag:
    """A flag without a counterpart; `instead` says what to do."""

    instead: str

    def sentence(self) -> str:
        """Returns the flag's sentence on the page of flags."""
        return f"refused: {self.instead}"


@dataclass(frozen=True)
class TranslatedFlag:
    """A flag whose value becomes flags of Eyas, or needs one that is given beside it; `settings` raises
    ValueError for one that cannot.
    """

    settings: Callable[[str, Knows], list[FlagSetting] | AcceptedWith]
    says: str

    def sentence(self) -> str:
        """Returns the flag's sentence on the page of flags."""
        return self.says


Meaning = SameFlag | AliasFlag | AcceptedFlag | AcceptedValues | AcceptedWith | RefusedFlag | TranslatedFlag


@dataclass(frozen=True)
class FlagRow:
    """One flag of other servers: its names there, what it means here, and how many values it takes.

    `takes` counts only where no flag of Eyas says it. `example`: a value that is accepted, for tests.
    """

    servers: str
    names: tuple[str, ...]
    meaning: Meaning
    takes: str = ONE
    example: str = "1"


def _with(text: str, note: str) -> str:
    return f"{text} ({note})" if note else text
