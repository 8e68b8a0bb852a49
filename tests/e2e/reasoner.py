"""A gateway over a scripted model that thinks, calls the tool `weather`, and answers when it has the result.

It is what agents need of a model and the embedded one is too small for. The HTTP front is the real one. It
refuses to know clients.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry

from eyas.common.config import GatewayConfig
from eyas.common.types import GenerationRequest
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.text.templates import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from tests.chat_templates import TEMPLATES
from tests.e2e.served import wait_until
from tests.rpc.scripted_backend import INFO, ScriptedBackend, nano_tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima", "sunny": true}}\n</tool_call>'
FIRST = f"<think>\nI must look.\n</think>\n\n{CALL}"
LAST = "<think>\nSo it rains.\n</think>\n\nIt rains in Lima."
START_S = 60.0


@contextlib.contextmanager
def reasoning(key: str) -> Iterator[str]:
    """The address of such a gateway, which takes this key."""
    tokenizer = Tokenizer(nano_tokenizer().table.hf, ChatTemplate(TEMPLATES["hermes"], {}))

    def says(request: GenerationRequest, choice: int) -> str:
        prompt = tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        return LAST if "<tool_response>" in prompt else FIRST

    infos = [msgspec.structs.replace(INFO, context_length=1 << 16)]
    backend = ScriptedBackend(tokenizer, says, infos=infos)
    app = create_app(GatewayConfig(api_keys=(key,)), backend, tokenizer, GatewayMetrics(CollectorRegistry()))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, START_S)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
