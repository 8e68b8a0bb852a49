"""Patterns for the texts of a JSON schema's `format`: some of them, never more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.common.grammars.regex_syntax import UnsupportedPattern
from eyas.common.grammars.string_rules import StringPattern

_HOUR, _BELOW_60 = "([01][0-9]|2[0-3])", "[0-5][0-9]"
_DAY = (
    "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"  # with its month
)
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(0[48]|[2468][048]|[13579][26])"  # two digits of a number that 4 divides, but not 100
_DATE = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
_TIME = f"{_HOUR}:{_BELOW_60}:{_BELOW_60}(\\.[0-9]{{1,6}})?(Z|[+-]{_HOUR}:{_BELOW_60})"
_N = "[0-9]{1,6}"
_DAYS, _CLOCK = (
    f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)",
    f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)",
)
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,40}[a-zA-Z0-9])?"
_HOST = f"{_LABEL}(\\.{_LABEL}){{0,4}}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_WORD = "[a-zA-Z0-9_+-]+"
_IN_PATH = f"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%{_HEX}{_HEX})"
_QUERY = f"(\\?({_IN_PATH}|[/?])*)?(#({_IN_PATH}|[/?])*)?"
_URI = f"[a-zA-Z][a-zA-Z0-9+.-]*://{_HOST}(:[1-9][0-9]{{0,3}})?(/{_IN_PATH}*)*{_QUERY}"
_POINTER = '(/([^/~\\x01-\\x1f"\\\\]|~[01])*)*'

FORMATS = {
    "email": f"{_WORD}(\\.{_WORD})*@{_LABEL}(\\.{_LABEL}){{1,4}}",
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|{_N}W)",
    "ipv4": f"({_OCTET}\\.){{3}}{_OCTET}",
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,6}}:{_GROUP}|::({_GROUP}(:{_GROUP}){{0,5}})?",
    "hostname": _HOST,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": f"{_URI}|(/{_IN_PATH}+)+{_QUERY}",
    "uri-template": f"{_URI}(\\{{[a-zA-Z0-9_]{{1,20}}\\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]{{0,5}})(#|{_POINTER})",
}
"""Patterns of whole texts, by the names of formats."""


def text_of(schema: Mapping[str, Any]) -> StringPattern:
    """The keywords of strings of a schema, together. Raises UnsupportedPattern for an unknown format."""
    pattern, format = schema.get("pattern"), schema.get("format")
    if pattern is not None and not isinstance(pattern, str):
        raise UnsupportedPattern("pattern must be a text")
    if format is not None and format not in FORMATS:
        raise UnsupportedPattern(
            f"the format is none of those that are supported ({', '.join(sorted(FORMATS))})"
        )
    return StringPattern(
        () if pattern is None else (pattern,),
        () if format is None else (FORMATS[format],),
        int(schema.get("minLength", 0)),
        None if schema.get("maxLength") is None else int(schema["maxLength"]),
    )
