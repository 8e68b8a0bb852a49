from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftServiceSessionRequest(_message.Message):
    __slots__ = ("opens", "commits", "closes", "channel")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[DraftOpen]
    commits: _containers.RepeatedCompositeFieldContainer[DraftCommit]
    closes: _containers.RepeatedCompositeFieldContainer[DraftClose]
    channel: DraftChannel
    def __init__(self, opens: _Optional[_Iterable[_Union[DraftOpen, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[DraftCommit, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[DraftClose, _Mapping]]] = ..., channel: _Optional[_Union[DraftChannel, _Mapping]] = ...) -> None: ...

class DraftChannel(_message.Message):
    __slots__ = ("export", "width", "nodes", "places", "rows", "gpu", "dtype")
    class ExportEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    export: _containers.ScalarMap[str, bytes]
    width: int
    nodes: int
    places: int
    rows: int
    gpu: bytes
    dtype: str
    def __init__(self, export: _Optional[_Mapping[str, bytes]] = ..., width: _Optional[int] = ..., nodes: _Optional[int] = ..., places: _Optional[int] = ..., rows: _Optional[int] = ..., gpu: _Optional[bytes] = ..., dtype: _Optional[str] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("seq", "generation", "base_len", "params", "choice", "handle", "attempt", "place", "steps")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    generation: int
    base_len: int
    params: _common_pb2.SamplingParams
    choice: int
    handle: _common_pb2.KvHandle
    attempt: int
    place: int
    steps: int
    def __init__(self, seq: _Optional[int] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choice: _Optional[int] = ..., handle: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ..., attempt: _Optional[int] = ..., place: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class DraftCommit(_message.Message):
    __slots__ = ("seq", "generation", "base_len", "tokens", "features", "steps", "topk", "draft_tokens", "lent")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    generation: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    features: bytes
    steps: int
    topk: int
    draft_tokens: int
    lent: int
    def __init__(self, seq: _Optional[int] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., features: _Optional[bytes] = ..., steps: _Optional[int] = ..., topk: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., lent: _Optional[int] = ...) -> None: ...

class DraftClose(_message.Message):
    __slots__ = ("seq", "generation")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    seq: int
    generation: int
    def __init__(self, seq: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class DraftServiceSessionResponse(_message.Message):
    __slots__ = ("proposals", "closed", "no_channel")
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    NO_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    closed: _containers.RepeatedCompositeFieldContainer[DraftClosed]
    no_channel: str
    def __init__(self, proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., closed: _Optional[_Iterable[_Union[DraftClosed, _Mapping]]] = ..., no_channel: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("seq", "generation", "base_len", "tokens", "parents")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    generation: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftClosed(_message.Message):
    __slots__ = ("seq", "generation", "reason")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seq: int
    generation: int
    reason: str
    def __init__(self, seq: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
