from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeWeightsRequest(_message.Message):
    __slots__ = ("command", "wait_s")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    command: bytes
    wait_s: float
    def __init__(self, command: _Optional[bytes] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ChangeWeightsResponse(_message.Message):
    __slots__ = ("reply",)
    REPLY_FIELD_NUMBER: _ClassVar[int]
    reply: bytes
    def __init__(self, reply: _Optional[bytes] = ...) -> None: ...
