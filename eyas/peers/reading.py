"""A command line with flags of vLLM and SGLang, and a file of flags, as one with flags of Eyas alone.

The parser says what flags of Eyas mean, and which values they take. An unknown flag, two names of one flag
with different values, and a flag without a counterpart end the command with one sentence.

A file of flags is YAML: one key per flag, without its hyphens. A list gives a flag several values, a mapping
one in JSON, true and false say whether a flag without values is set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from eyas.commands import ReadLine
from eyas.common.nearest import nearest
from eyas.peers.meanings import (
    MANY,
    NONE,
    SWITCH,
    AcceptedFlag,
    AcceptedValues,
    AcceptedWith,
    AliasFlag,
    FlagRow,
    FlagSetting,
    RefusedFlag,
    SameFlag,
    TranslatedFlag,
)
from eyas.peers.table import BY_NAME

if TYPE_CHECKING:
    from yaml import Node

MODEL = "MODEL"
"""The name of a command's model where it is a word without a flag."""
_SWITCHES = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True)
class _GivenSetting:
    """A setting, and the name under which it was typed."""

    typed: str
    setting: FlagSetting


def read(parser: argparse.ArgumentParser, words: Sequence[str]) -> ReadLine:
    """The command line `words` of `parser`'s command. Ends the command where it cannot be read."""
    line = _SettingsReader(parser)
    line.read(words)
    files = [given.setting.values[0] for given in line.given if given.setting.flag == "--config"]
    if not files:
        return line.reading()

    below = _SettingsReader(parser)
    try:
        for name, values in FlagFile(files[-1]).flags():
            below.read_flag(name, values)
    except ValueError as error:
        parser.error(f"--config: {error}")
    return line.reading(below)


class _SettingsReader:
    """One command line, or one file, as it is read."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._actions = parser._option_string_actions
        self.given: list[_GivenSetting] = []
        self._rest: list[str] = []  # words that are no flags, and what follows "--"
        self._notes: dict[str, str] = {}
        self._conditions: list[tuple[str, AcceptedWith]] = []

    def read(self, words: Sequence[str]) -> None:
        """Reads words in order."""
        left = list(words)
        while left:
            word = left.pop(0)
            if word == "--":
                self._rest += [word, *left]
                return
            if word.startswith("-") and len(word) > 1 and not _is_number(word):
                self._read_word(word, left)
            elif any(action.dest == MODEL for action in self._parser._actions):
                if any(given.typed == MODEL for given in self.given):
                    self._parser.error(f"unknown: {word!r}: a server has one model")
                self._give(MODEL, FlagSetting("--model", (word,)))
            else:
                self._rest.append(word)

    def read_flag(self, name: str, values: list[str] | bool) -> None:
        """One flag with its values, or whether it is set if it has none (as a file may say)."""
        typed = self._known(f"--{name}")
        if isinstance(values, bool):
            self._switch(typed, values)
        elif self._takes(typed) in (NONE, SWITCH):
            answer = _SWITCHES.get(values[0].lower()) if len(values) == 1 else None
            if answer is None:
                self._fail(typed, "takes true or false")
            self._switch(typed, answer)
        elif isinstance(self._actions.get(typed), argparse._ExtendAction):
            for value in values:
                self._mean(typed, (value,))
        elif len(values) != 1 and self._takes(typed) != MANY:
            self._fail(typed, "takes one value")
        else:
            self._mean(typed, tuple(values))

    def _read_word(self, word: str, left: list[str]) -> None:
        name, equals, value = word.partition("=")
        typed = self._known(name)
        takes = self._takes(typed)
        if equals:
            if takes == SWITCH and value.lower() in _SWITCHES:
                self._switch(typed, _SWITCHES[value.lower()])
            elif takes in (NONE, SWITCH) and typed not in self._actions:
                self._fail(typed, "takes no value")
            else:
                self._mean(typed, (value,))
        elif takes == SWITCH and left and left[0].lower() in ("true", "false"):
            self._switch(typed, left.pop(0).lower() == "true")
        else:
            self._mean(typed, tuple(_values(takes, left)))

    def _switch(self, typed: str, on: bool) -> None:
        if on:
            self._mean(typed, ())
        elif (opposite := f"--no-{typed.removeprefix('--')}") in (*BY_NAME, *self._actions):
            self._mean(opposite, ())

    def _known(self, name: str) -> str:
        """The name as the parser or the table has it: there, underscores count as hyphens."""
        for spelling in (name, name.replace("_", "-")):
            if spelling in self._actions or spelling in BY_NAME:
                return spelling
        known = [flag for flag in (*self._actions, *BY_NAME) if flag.startswith("--")]
        self._parser.error(f"unknown: {name}{nearest(name, known)}")

    def _takes(self, typed: str) -> str:
        row = BY_NAME.get(typed)
        own = typed
        if typed not in self._actions and row is not None:
            if not isinstance(row.meaning, AliasFlag):
                return row.takes
            own = row.meaning.flag
        action = self._actions.get(own)
        if action is None:
            return row.takes if row is not None else NONE
        return {0: NONE, "+": MANY}.get(action.nargs, "one")

    # --- meanings ------------------------------------------------------------------------------------------

    def _mean(self, typed: str, values: tuple[str, ...]) -> None:
        row = BY_NAME.get(typed)
        if typed in self._actions:
            convert = row.meaning.convert if row is not None and isinstance(row.meaning, SameFlag) else None
            flag = self._actions[typed].option_strings[0]
            self._give(typed, FlagSetting(flag, self._converted(typed, convert, values)))
            return
        assert row is not None
        if self._takes(typed) not in (NONE, SWITCH) and not values:
            self._fail(typed, "needs a value")
        self._mean_row(typed, row, values)

    def _mean_row(self, typed: str, row: FlagRow, values: tuple[str, ...]) -> None:
        meaning = row.meaning
        if isinstance(meaning, SameFlag):
            self._fail(typed, f"is no flag of `{self._parser.prog}`: it is one of `eyas serve`")
        elif isinstance(meaning, AliasFlag):
            self._alias(typed, meaning, values)
        elif isinstance(meaning, AcceptedFlag):
            self._notes[typed] = meaning.why
        elif isinstance(meaning, AcceptedValues):
            if values[0] not in meaning.values:
                self._fail(typed, f"{values[0]!r} is not served: {meaning.instead}")
            self._notes[typed] = meaning.why
        elif isinstance(meaning, AcceptedWith):
            self._conditions.append((typed, meaning))
        elif isinstance(meaning, RefusedFlag):
            self._fail(typed, meaning.instead)
        else:
            self._translate(typed, meaning, values[0])

    def _alias(self, typed: str, meaning: AliasFlag, values: tuple[str, ...]) -> None:
        if meaning.flag not in self._actions:
            self._fail(typed, f"is {meaning.flag} of `eyas serve`, which `{self._parser.prog}` does not have")
        action = self._actions[meaning.flag]
        values = self._converted(typed, meaning.convert, values)
        for value in values:
            self._check(typed, action, value)
        self._give(typed, FlagSetting(action.option_strings[0], values))

    def _translate(self, typed: str, meaning: TranslatedFlag, value: str) -> None:
        try:
            settings = meaning.settings(value, self._actions.__contains__)
        except ValueError as error:
            self._fail(typed, str(error))
        if isinstance(settings, AcceptedWith):
            self._conditions.append((typed, settings))
            return
        if not settings:
            self._notes[typed] = f"{value!r} is how Eyas does it"
        for setting in settings:
            if setting.flag not in self._actions:
                self._fail(
                    typed, f"is {setting.flag} of `eyas serve`, which `{self._parser.prog}` does not have"
                )
            for each in setting.values:
                self._check(typed, self._actions[setting.flag], each)
            self._give(typed, setting)

    def _converted(
        self, typed: str, convert: Callable[[str], str] | None, values: tuple[str, ...]
    ) -> tuple[str, ...]:
        if convert is None:
            return values
        try:
            return tuple(convert(value) for value in values)
        except ValueError as error:
            self._fail(typed, str(error))

    def _check(self, typed: str, action: argparse.Action, value: str) -> None:
        """Refuses a value by the name that was typed, which argparse does not have."""
        try:
            parsed = action.type(value) if callable(action.type) else value
        except argparse.ArgumentTypeError as error:
            self._fail(typed, str(error))
        except ValueError:
            self._fail(typed, f"{value!r} is not valid")
        if action.choices is not None and parsed not in action.choices:
            self._fail(typed, f"{value!r} is none of {', '.join(map(str, action.choices))}")

    def _give(self, typed: str, setting: FlagSetting) -> None:
        """Takes a setting, unless another name of its flag has another value. A repeated name counts last."""
        for given in () if setting.weak else self.given:
            same = given.setting.flag == setting.flag and not given.setting.weak
            if same and given.typed != typed and given.setting.values != setting.values:
                self._parser.error(
                    f"{given.typed} and {typed} are two names of one flag, {setting.flag}, and their values "
                    f"differ: {_said(given.setting)} and {_said(setting)}"
                )
        self.given.append(_GivenSetting(typed, setting))

    def _fail(self, typed: str, why: str) -> NoReturn:
        self._parser.error(f"{typed}: {why}")

    # --- the end -------------------------------------------------------------------------------------------

    def reading(self, below: _SettingsReader | None = None) -> ReadLine:
        """The command line in Eyas' own flags; what it sets stands above what `below` does."""
        above = {given.setting.flag for given in self.given if not given.setting.weak}
        lower = [] if below is None else [given for given in below.given if given.setting.flag not in above]
        given = [*lower, *self.given]
        strong = {each.setting.flag for each in given if not each.setting.weak}
        settings = [each.setting for each in given if not (each.setting.weak and each.setting.flag in strong)]
        notes = self._notes if below is None else below._notes | self._notes
        conditions = [*(below._conditions if below is not None else ()), *self._conditions]
        for typed, condition in conditions:
            if strong.isdisjoint(condition.flags):
                self._fail(typed, condition.instead)
            notes = notes | {typed: condition.why}
        rest = [*(below._rest if below is not None else ()), *self._rest]
        remarks = tuple(f"{typed} changes nothing: {why}" for typed, why in notes.items())
        return ReadLine([*_words(settings), *rest], remarks)


def _words(settings: Sequence[FlagSetting]) -> Iterator[str]:
    for setting in settings:
        if len(setting.values) == 1:
            yield f"{setting.flag}={setting.values[0]}"
        else:
            yield from (setting.flag, *setting.values)


def _values(takes: str, left: list[str]) -> Iterator[str]:
    """Takes a flag's values from the words behind it."""
    most = {NONE: 0, SWITCH: 0, MANY: len(left)}.get(takes, 1)
    while most and left and not (left[0].startswith("-") and len(left[0]) > 1 and not _is_number(left[0])):
        yield left.pop(0)
        most -= 1


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _said(setting: FlagSetting) -> str:
    return " ".join(setting.values) or "on"


class FlagFile:
    """The flags in one file. Raises ValueError, with a sentence, for a file that cannot be read."""

    def __init__(self, path: str) -> None:
        import yaml  # which few command lines need

        try:
            with open(path, encoding="utf-8") as file:
                self._root = yaml.compose(file, yaml.SafeLoader)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
        self._path = path

    def flags(self) -> Iterator[tuple[str, list[str]]]:
        """Names, as they are written, and values as texts. Raises ValueError for what is no flag."""
        if self._root is None:
            return
        import yaml

        if not isinstance(self._root, yaml.MappingNode):
            raise ValueError(f"{self._path} is no mapping of flags to values")
        names: set[str] = set()
        for key, value in self._root.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{self._path} has a key that is no flag's name")
            name = key.value.removeprefix("--")
            if name.replace("_", "-") in names:
                raise ValueError(f"{self._path} has {name} twice")
            if name == "config":
                raise ValueError(f"{self._path} names another file of flags")
            names.add(name.replace("_", "-"))
            yield name, self._values(name, value)

    def _values(self, name: str, node: Node) -> list[str]:
        """Returns the values as texts: a scalar as it is written, so that no or 1e3 stay what they are."""
        import yaml

        if isinstance(node, yaml.ScalarNode):
            if node.tag == "tag:yaml.org,2002:null":
                raise ValueError(f"{self._path}: {name} has no value")
            return [node.value]
        if isinstance(node, yaml.SequenceNode):
            if any(isinstance(item, yaml.SequenceNode) for item in node.value):
                raise ValueError(f"{self._path}: {name} has a list in a list")
            return [text for item in node.value for text in self._values(name, item)]
        try:
            return [json.dumps(yaml.SafeLoader("").construct_document(node))]
        except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self._path}: {name} is not a value that JSON has: {reason}") from error
