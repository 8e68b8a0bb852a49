"""The Python SDK of Eyas.

    from eyas.client import Client

    with Client("127.0.0.1:8001") as client:
        print(client.chat([{"role": "user", "content": "What is the capital of France?"}]).text)

`AsyncClient` is the same for asyncio. The SDK needs neither torch nor a model.
"""

from eyas.client.aio import AsyncClient, AsyncStream
from eyas.client.sync import Client, Stream
from eyas.client.types import (
    ChatOptions,
    Choice,
    Completion,
    Delta,
    FinishReason,
    LoraAdapter,
    MemoryTag,
    Message,
    Model,
    MovedMemory,
    Options,
    PauseMode,
    PromptLogprobs,
    Timings,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
    WeightsUpdated,
    WorkerTimings,
)
from eyas.client.weights import BroadcastTensors, DeviceTensors, SharedTensors
from eyas.common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    EyasError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthorized,
    Unavailable,
)
from eyas.common.grammars.notations import Grammar
from eyas.common.types import TokenLogprob

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BroadcastTensors",
    "Cancelled",
    "ChatOptions",
    "Choice",
    "Client",
    "Completion",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Delta",
    "DeviceTensors",
    "EyasError",
    "FinishReason",
    "Grammar",
    "InvalidRequest",
    "LoraAdapter",
    "MemoryTag",
    "Message",
    "Model",
    "MovedMemory",
    "NotFound",
    "Options",
    "Overloaded",
    "PauseMode",
    "PromptLogprobs",
    "SharedTensors",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Unauthorized",
    "Unavailable",
    "Usage",
    "WeightsUpdated",
    "WorkerTimings",
]
