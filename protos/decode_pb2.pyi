from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_ATTACH: _ClassVar[Source]
    SOURCE_LOCAL: _ClassVar[Source]
SOURCE_UNSPECIFIED: Source
SOURCE_ATTACH: Source
SOURCE_LOCAL: Source

class DecodeServiceSessionRequest(_message.Message):
    __slots__ = ("submit", "attach", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    attach: Attach
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "attempt", "source")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.GenerationRequest
    attempt: int
    source: Source
    def __init__(self, request: _Optional[_Union[_common_pb2.GenerationRequest, _Mapping]] = ..., attempt: _Optional[int] = ..., source: _Optional[_Union[Source, str]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("id", "attempt", "handles", "first_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: int
    handles: _containers.RepeatedCompositeFieldContainer[_common_pb2.KvHandle]
    first_tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.FirstToken]
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[int] = ..., handles: _Optional[_Iterable[_Union[_common_pb2.KvHandle, _Mapping]]] = ..., first_tokens: _Optional[_Iterable[_Union[_common_pb2.FirstToken, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id", "choice")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    id: str
    choice: int
    def __init__(self, id: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class DecodeServiceSessionResponse(_message.Message):
    __slots__ = ("admitted", "rejected", "lost", "failed", "heartbeat", "step")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    rejected: Rejected
    lost: Lost
    failed: Failed
    heartbeat: Heartbeat
    step: Step
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("id", "attempt")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: int
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("id", "attempt", "status")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: int
    status: _common_pb2.Status
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("id", "attempt")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: int
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("id", "attempt", "choice", "status")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: int
    choice: int
    status: _common_pb2.Status
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("running", "waiting", "pages_used", "pages_total", "draining", "late")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    draining: bool
    late: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., draining: _Optional[bool] = ..., late: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("ids", "attempts", "choices", "indices", "counts", "tokens", "accepted", "offered", "extras")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    offered: _containers.RepeatedScalarFieldContainer[int]
    extras: _containers.RepeatedCompositeFieldContainer[Extra]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., offered: _Optional[_Iterable[int]] = ..., extras: _Optional[_Iterable[_Union[Extra, _Mapping]]] = ...) -> None: ...

class Extra(_message.Message):
    __slots__ = ("row", "logprobs", "finish", "timings", "prompt")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    row: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    finish: _common_pb2.Finish
    timings: _common_pb2.Timings
    prompt: _common_pb2.PromptLogprobs
    def __init__(self, row: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[_common_pb2.Finish, str]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., prompt: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...
