"""The flags of `eyas certs`, and the commands of `eyas keys`, whose module has their flags."""

from __future__ import annotations

import argparse

from eyas.commands import CommandEntry, CommandParser
from eyas.common.cluster.names import is_host
from eyas.flags import host, names, positive

KEYS = "eyas.admin.keys"
DAYS = 365
HERE = ("localhost", "127.0.0.1", "::1")


def add_keys(parser: CommandParser) -> None:
    """The commands of `eyas keys`."""
    parser.add_commands(
        {
            "add": CommandEntry(
                "make a key, print it once, and write its hash to a file", KEYS, {"does": "add"}
            ),
            "list": CommandEntry("the names in a file", KEYS, {"does": "list"}),
            "remove": CommandEntry("take a key out of a file", KEYS, {"does": "remove"}),
        }
    )


def add_certs(parser: CommandParser) -> None:
    """Adds the flags of `eyas certs`: where its files go, and what they say."""
    add = parser.add_argument
    add("folder", metavar="DIR", help="made if it is not there; an authority in it signs again")
    add("--days", type=positive, default=DAYS, metavar="N", help=f"how long certificates are valid ({DAYS})")
    text = f"what callers call the gateway: host names or IP addresses ({','.join(HERE)})"
    add("--names", type=hosts, default=HERE, metavar="NAME,...", help=text)


def _fits(name: str) -> bool:
    """Is it as short as names of hosts are? RFC 1035, section 2.3.4."""
    return len(name) <= 253 and all(len(label) <= 63 for label in name.split("."))


def hosts(text: str) -> tuple[str, ...]:
    """Host names, also *.NAME, and IP addresses, separated by commas."""
    listed = tuple(map(host, names(text)))
    wrong = [name for name in listed if not is_host(name.removeprefix("*.")) or not _fits(name)]
    if wrong or not listed:
        raise argparse.ArgumentTypeError(f"{(wrong or [text])[0]!r} is not a host name or an IP address")
    return listed
