"""A file of flags, in YAML: one key per flag, without its hyphens.

A list gives a flag several values, a mapping one in JSON, true and false say whether a flag without values is
set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import yaml


class FlagFile:
    """The flags in one file. Raises ValueError, with a sentence, for a file that cannot be read."""

    def __init__(self, path: str) -> None:
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

    def _values(self, name: str, node: yaml.Node) -> list[str]:
        """Returns the values as texts: a scalar as it is written, so that no or 1e3 stay what they are."""
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
