from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request", "attempt", "offer_draft")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFER_DRAFT_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.GenerationRequest
    attempt: int
    offer_draft: bool
    def __init__(self, request: _Optional[_Union[_common_pb2.GenerationRequest, _Mapping]] = ..., attempt: _Optional[int] = ..., offer_draft: _Optional[bool] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id", "attempt")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: int
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("admitted", "started", "done")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    admitted: PrefillAdmitted
    started: PrefillStarted
    done: PrefillDone
    def __init__(self, admitted: _Optional[_Union[PrefillAdmitted, _Mapping]] = ..., started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillAdmitted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedCompositeFieldContainer[_common_pb2.KvHandle]
    def __init__(self, handles: _Optional[_Iterable[_Union[_common_pb2.KvHandle, _Mapping]]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("choices", "timings")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[_common_pb2.FirstToken]
    timings: _common_pb2.Timings
    def __init__(self, choices: _Optional[_Iterable[_Union[_common_pb2.FirstToken, _Mapping]]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ...) -> None: ...
