"""A side: one server and the settings with which it is asked, as the command line names it."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

from eyas.common.errors import ConfigError
from eyas.configuration import client_key
from eyas.flags import http_url


@dataclass(frozen=True)
class EvalSide:
    """A server to ask. `model` None: the first that the server lists. `speculative` False: without drafts."""

    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    model: str | None = None
    speculative: bool = True
    ca: str | None = None

    def __str__(self) -> str:
        drafts = "" if self.speculative else ", no-speculative"
        return f"{self.url}, {self.model}{drafts}"


def sides_of(args: argparse.Namespace) -> list[EvalSide]:
    """The first side, and the second if there is one. Raises ConfigError for a side that cannot be read."""
    first = EvalSide(args.url, client_key(args), args.model, not args.no_speculative, args.ca)
    if args.against is None:
        return [first]
    second = read_side(args.against, first)
    if second == first:
        raise ConfigError("--against: both sides are the same", param="against")
    return [first, second]


def read_side(text: str, first: EvalSide) -> EvalSide:
    """A side from settings between commas; what they do not say is as on the first side."""
    side = first
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if setting in ("speculative", "no-speculative"):
            side = dataclasses.replace(side, speculative=setting == "speculative")
        elif name == "model" and value:
            side = dataclasses.replace(side, model=value)
        elif name == "api-key" and value:
            side = dataclasses.replace(side, api_key=value)
        elif name == "ca" and value:
            side = dataclasses.replace(side, ca=value)
        else:
            side = dataclasses.replace(side, url=_url(setting))
    return side


def _url(text: str) -> str:
    try:
        return http_url(text)
    except argparse.ArgumentTypeError as error:
        known = "a URL, model=ID, api-key=K, ca=FILE, speculative, no-speculative"
        raise ConfigError(f"--against: {text!r} is none of {known}", param="against") from error
