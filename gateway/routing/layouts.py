"""The place where requests begin: by the workers' roles, or (`gateway.routing.auto`) by prediction.

A layout is asked once per request; what happens to a request under way is decided by roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.backends.delivery import TokenTimes
from gateway.routing import router
from gateway.routing.router import RequestRoute, RouterCandidate


class RequestLayout(Protocol):
    """Chooses the workers of new requests. No method waits."""

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        """The workers for a new prompt of `prompt` tokens; None while no worker and no pair can serve it."""
        ...

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """A request has been sent there, whose prompt's `missing` tokens are to be computed."""
        ...

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """A request has ended that began there, however it ended."""
        ...


class StaticLayout(RequestLayout):
    """Routing by roles: a decode worker, and a prefill worker if that one computes no prompts."""

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        return router.route(workers)

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """Does nothing."""

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """Does nothing."""
