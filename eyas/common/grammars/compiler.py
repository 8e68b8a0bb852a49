"""Compiles grammars with xgrammar, for a model's vocabulary.

xgrammar's core needs neither torch nor transformers, and importing them takes seconds, so a process that has
not imported them goes without. Nothing here bounds time or memory: `gateway.grammars.checks` does, before a
grammar goes anywhere else.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.grammars import json_schema
from eyas.common.grammars.forced_text import check_forced
from eyas.common.grammars.json_rules import JsonStyle, json_rules
from eyas.common.grammars.notations import BARE_TEXT, POINTER, BareText, Grammar, GrammarKind, renewed
from eyas.common.grammars.regex_syntax import UnsupportedPattern
from eyas.common.grammars.schemas.document import refuse
from eyas.common.grammars.string_rules import PLAIN, StringContext, StringPattern, rules_of
from eyas.common.tokenizers.vocabulary import pieces

MAX_CHOICES = 1000

_MOST_SAID = 300  # characters of a reason: errors may quote the whole grammar
_ORIGIN = re.compile(r"^(\[[0-9:]*\] )?(/\S+:\d+: )?")
_ABSENT = ("torch", "transformers")


_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
_HALF = re.compile(r"(?P<half>\\u(?:d[89a-f])[0-9a-f]{2})|\\.", re.DOTALL)
_ITEM = r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|\\.|[^\\]"
_ITEMS = re.compile(rf"(?P<first>{_ITEM})(?:-(?P<last>{_ITEM}))?", re.DOTALL)
_FIRST_HALF, _LAST_HALF = 0xD800, 0xDFFF


# xgrammar's rules as it prints them, without halves of surrogate pairs, which no text has. The library's
# classes hold them as bytes that decode to three characters, so that an answer would not be what its grammar
# says. Only literals and classes are read; rules stay as they are.
def of_characters(rules: str) -> str:
    """Rules of the same texts. Raises InvalidRequest for a literal with a half, and a class of halves."""
    return _PARTS.sub(lambda part: _whole(part[0]), rules)


def _whole(part: str) -> str:
    if part.startswith("[^"):
        return rf"{part[:-1]}\ud800-\udfff]"
    if part[0] == "[":
        return f"[{_ITEMS.sub(_without_halves, part[1:-1]) or _refuse(part)}]"
    for escape in _HALF.finditer(part):
        if escape["half"]:
            _refuse(part)
    return part


def _without_halves(items: re.Match[str]) -> str:
    """A character or a range of a class, without the halves in it."""
    first, last = items["first"], items["last"] or items["first"]
    if _code(last) < _FIRST_HALF or _code(first) > _LAST_HALF:
        return items[0]
    below = rf"{first}-\ud7ff" if _code(first) < _FIRST_HALF else ""
    return below + (rf"\ue000-{last}" if _code(last) > _LAST_HALF else "")


def _code(item: str) -> int:
    """The character's number; of a short escape some number that is as far from halves."""
    return int(item[2:], 16) if item[:2] in (r"\x", r"\u", r"\U") else ord(item[-1])


def _refuse(part: str) -> str:
    raise InvalidRequest(f"{part:.40} holds half of a surrogate pair, which is no text", param="grammar")


def library() -> Any:
    """The module `xgrammar`."""
    if "xgrammar" not in sys.modules:
        with _without(*(name for name in _ABSENT if name not in sys.modules)):
            import xgrammar  # noqa: F401
    return sys.modules["xgrammar"]


class GrammarCompiler:
    """Compiles grammars for the vocabulary of a model's folder. One thread uses it."""

    def __init__(self, folder: Path, vocab_size: int | None = None, eos_ids: Sequence[int] = ()) -> None:
        """`vocab_size`: how many ids the model has; None: as many as its tokenizer.

        Raises InvalidRequest if the folder has no tokenizer that grammars can be followed with.
        """
        xgrammar = library()
        known = pieces(folder)
        vocab_size = len(known) if vocab_size is None else vocab_size
        self.pieces = known[:vocab_size] + [b""] * (vocab_size - len(known))  # what each id writes
        info = xgrammar.TokenizerInfo(
            self.pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Any:
        """An `xgrammar.CompiledGrammar`. Raises InvalidRequest, which says what is wrong with the grammar."""
        grammar.validate()
        try:
            return self._compile(grammar)
        except InvalidRequest:
            raise
        except Exception as error:  # the library has no one class of its own
            raise InvalidRequest(_reason(error), param="grammar") from None

    def _compile(self, grammar: Grammar) -> Any:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._of_rules(rules_of_schema(json.loads(grammar.text)))
            case GrammarKind.JSON_OBJECT:
                return self._of_rules(rules_of_schema({"type": "object"}))
            case GrammarKind.REGEX:
                return self._of_rules(_regex(grammar.text))
            case GrammarKind.EBNF:
                return self._of_rules(_of_characters(grammar.text))
            case GrammarKind.CHOICE:
                return self._tag({"type": "structural_tag", "format": _one_of(json.loads(grammar.text))})
        return self._tag(_exact_tag(json.loads(grammar.text)))

    def _tag(self, tag: dict[str, Any]) -> Any:
        compiled = self._compiler.compile_structural_tag(json.dumps(tag))
        check_forced(str(compiled.grammar))
        return compiled

    def _of_rules(self, rules: str) -> Any:
        check_forced(rules)
        return self._compiler.compile_grammar(library().Grammar.from_ebnf(rules))


def rules_of_schema(schema: Any, pointer: str = "#", style: JsonStyle = JsonStyle.JSON) -> str:
    """The rules of a schema's values. Raises InvalidRequest, which points into the schema."""
    return json_rules(json_schema.rules_of(schema, pointer), style)


def _regex(pattern: str) -> str:
    """The rules of the texts that a pattern matches as a whole."""
    try:
        return rules_of(StringPattern(anchored=(pattern,)), PLAIN, "root")
    except UnsupportedPattern as reason:
        raise InvalidRequest(f"the pattern is not supported: {reason}", param="grammar") from None


def _of_characters(rules: str) -> str:
    """Rules whose classes are made those of characters alone."""
    return of_characters(str(library().Grammar.from_ebnf(rules)))


def _one_of(texts: Any) -> dict[str, Any]:
    """The format of a choice. Raises InvalidRequest for anything but a few texts."""
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest("a choice must be a list of texts that are not empty", param="grammar")
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(f"a choice must be of 1 to {MAX_CHOICES} texts", param="grammar")
    parts = [{"type": "const_string", "value": text} for text in dict.fromkeys(texts)]
    return {"type": "or", "elements": parts}


def _exact_tag(tag: Any) -> Any:
    """The tag with rules for every JSON schema, pattern and grammar in it. Raises InvalidRequest for one that
    cannot be followed.
    """
    if not isinstance(tag, dict):
        raise InvalidRequest("a structural tag must be an object", param="grammar")
    if "format" not in tag and "structures" in tag:
        tag = renewed(tag)
    todo: list[tuple[Any, str]] = [(tag, "#")]
    while todo:
        value, pointer = todo.pop()
        if isinstance(value, list):
            todo += [(part, f"{pointer}/{i}") for i, part in enumerate(value)]
        elif isinstance(value, dict) and "json_schema" in value:
            _follow_schema(value, pointer)
        elif isinstance(value, dict):
            if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
                _become(value, _regex(value["pattern"]))
            elif value.get("type") == BARE_TEXT:
                _become(value, _bare_text(value, pointer))
            elif value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
                _become(value, _of_characters(value["grammar"]))
            todo += [(part, f"{pointer}/{name}") for name, part in value.items()]
    return tag


def _bare_text(form: dict[str, Any], pointer: str) -> str:
    """The rules of text as it stands."""
    try:
        bare = msgspec.convert(form, BareText)
    except msgspec.ValidationError as error:
        refuse(pointer, str(error))
    text = StringPattern(bare.patterns, bare.anchored, bare.least, bare.most)
    try:
        return rules_of(text, StringContext(bare.never), "root")
    except UnsupportedPattern as reason:
        refuse(bare.pointer, str(reason))


def _follow_schema(form: dict[str, Any], pointer: str) -> None:
    """Makes the format of a JSON value that of the rules of its schema."""
    if form.get("type", "json_schema") != "json_schema":
        refuse(pointer, f"the type {str(form['type'])[:40]} is not supported")
    for name in ("any_order", "excludes"):
        if form.get(name):
            refuse(f"{pointer}/{name}", f"{name} is not supported")
    if (style := form.get("style", JsonStyle.JSON.value)) not in [known.value for known in JsonStyle]:
        refuse(f"{pointer}/style", f"the style {str(style)[:40]} is not supported")
    at = str(form.get(POINTER, f"{pointer}/json_schema"))
    _become(form, rules_of_schema(form["json_schema"], at, JsonStyle(style)))


def _become(form: dict[str, Any], rules: str) -> None:
    form.clear()
    form.update(type="grammar", grammar=rules)


def _reason(error: Exception) -> str:
    """Returns the library's message, without places in its source, and without the whole grammar."""
    text = _ORIGIN.sub("", str(error).strip())
    text = " ".join(text.split()) or type(error).__name__
    return f"it cannot be compiled: {text[:_MOST_SAID]}{'...' if len(text) > _MOST_SAID else ''}"


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    """Replaces modules of these names by empty shells inside the `with`."""
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: its import fails
    try:
        with contextlib.suppress(ImportError):
            import tvm_ffi  # noqa: F401  # it takes note of what is missing; xgrammar would not
        sys.modules.update({name: _EmptyClass(name) for name in names})
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


class _EmptyClass(ModuleType):
    """Has every name: a class of no content."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **named: None})
