"""The flags of vLLM and SGLang, and what each means on the command line of Eyas.

It lists all rows, one per flag, by topic and by name; docs/coming-from.md is printed from it.
"""

from __future__ import annotations

from eyas.peers.engine_rows import COMPUTING, DRAFTS, MEMORY
from eyas.peers.gateway_rows import GATEWAY, LOGS, SPLIT
from eyas.peers.model_rows import MODEL

TOPICS = {
    "Model and answers": MODEL,
    "Memory and steps": MEMORY,
    "GPUs and kernels": COMPUTING,
    "Drafts": DRAFTS,
    "HTTP, tools and formats": GATEWAY,
    "Logs, metrics and traces": LOGS,
    "Prefill and decode apart": SPLIT,
}
ROWS = tuple(row for rows in TOPICS.values() for row in rows)
BY_NAME = {name: row for row in ROWS for name in row.names}
