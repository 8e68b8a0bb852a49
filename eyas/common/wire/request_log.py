"""The one line that a worker logs per request: it ties the caller's id to the cluster's."""

from __future__ import annotations

import logging

from eyas.common.logging import serving
from eyas.common.types import GenerationRequest


def log_request(log: logging.Logger, request: GenerationRequest, attempt: int) -> None:
    """Logs that a worker was given a request. Canaries have no caller, and no line."""
    if request.request_id:
        with serving(request.request_id, request.traceparent):
            log.info("request %s, attempt %d: %d prompt tokens", request.id, attempt, len(request.prompt_ids))
