"""The report of a worker on the ways by which KV pages come to it: records, and their form on the wire."""

from __future__ import annotations

import msgspec

from protos import worker_pb2


class PageLink(msgspec.Struct, frozen=True):
    """How pages of the rank `rank` of an owner come to a puller.

    `path`: the backend that requests' pages come by, or would; empty if none leads there. `passed_over`: why
    each better way is not taken, by name, the best first. `latency_s`: seconds that one page takes, alone;
    `bytes_per_s`: of many pages at a time. `pulls` from all of the owner's ranks, and `pulled_bytes`, are
    totals since the puller's engine started. `problem`: what kept the link from being measured, so that
    figures are 0.0; empty if nothing did.
    """

    rank: int
    path: str = ""
    passed_over: dict[str, str] = {}
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    pulls: int = 0
    pulled_bytes: int = 0
    problem: str = ""


def link_to_pb(link: PageLink) -> worker_pb2.Link:
    """Writes one link."""
    fields = msgspec.structs.asdict(link)
    over = [worker_pb2.PassedOver(path=path, reason=reason) for path, reason in link.passed_over.items()]
    return worker_pb2.Link(**{**fields, "passed_over": over})


def link_from_pb(pb: worker_pb2.Link) -> PageLink:
    """Reads one link."""
    fields = {name: getattr(pb, name) for name in PageLink.__struct_fields__}
    return PageLink(**{**fields, "passed_over": {over.path: over.reason for over in pb.passed_over}})
