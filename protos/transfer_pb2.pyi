from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeRequest(_message.Message):
    __slots__ = ("group", "layout_hash")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    group: _common_pb2.KvKind
    layout_hash: str
    def __init__(self, group: _Optional[_Union[_common_pb2.KvKind, str]] = ..., layout_hash: _Optional[str] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("layout_hash", "epoch", "geometry", "ranks", "board", "arithmetic")
    class BoardEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    layout_hash: str
    epoch: int
    geometry: Geometry
    ranks: _containers.RepeatedCompositeFieldContainer[RankPool]
    board: _containers.ScalarMap[str, bytes]
    arithmetic: str
    def __init__(self, layout_hash: _Optional[str] = ..., epoch: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankPool, _Mapping]]] = ..., board: _Optional[_Mapping[str, bytes]] = ..., arithmetic: _Optional[str] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("pages", "page_size", "layers", "kv_heads", "head_dim", "dtype", "fields", "state_pages")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    fields: int
    state_pages: int
    def __init__(self, pages: _Optional[int] = ..., page_size: _Optional[int] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., fields: _Optional[int] = ..., state_pages: _Optional[int] = ...) -> None: ...

class RankPool(_message.Message):
    __slots__ = ("rank", "checksum", "exports")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    EXPORTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    checksum: int
    exports: _containers.RepeatedCompositeFieldContainer[PoolExport]
    def __init__(self, rank: _Optional[int] = ..., checksum: _Optional[int] = ..., exports: _Optional[_Iterable[_Union[PoolExport, _Mapping]]] = ...) -> None: ...

class PoolExport(_message.Message):
    __slots__ = ("backend", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    backend: str
    fields: _containers.ScalarMap[str, bytes]
    def __init__(self, backend: _Optional[str] = ..., fields: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("handle", "attempt")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    handle: _common_pb2.KvHandle
    attempt: int
    def __init__(self, handle: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("ready", "done", "failed")
    READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ready: WatchReady
    done: WatchDone
    failed: WatchFailed
    def __init__(self, ready: _Optional[_Union[WatchReady, _Mapping]] = ..., done: _Optional[_Union[WatchDone, _Mapping]] = ..., failed: _Optional[_Union[WatchFailed, _Mapping]] = ...) -> None: ...

class WatchReady(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class WatchDone(_message.Message):
    __slots__ = ("choices", "last_feature")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LAST_FEATURE_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[_common_pb2.FirstToken]
    last_feature: bytes
    def __init__(self, choices: _Optional[_Iterable[_Union[_common_pb2.FirstToken, _Mapping]]] = ..., last_feature: _Optional[bytes] = ...) -> None: ...

class WatchFailed(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("epoch", "id", "attempt", "one_way")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ONE_WAY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    id: int
    attempt: int
    one_way: bool
    def __init__(self, epoch: _Optional[int] = ..., id: _Optional[int] = ..., attempt: _Optional[int] = ..., one_way: _Optional[bool] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("epoch", "id", "attempt", "pages", "rank", "first_head", "heads", "on_device", "group")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    id: int
    attempt: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    first_head: int
    heads: int
    on_device: bool
    group: _common_pb2.KvKind
    def __init__(self, epoch: _Optional[int] = ..., id: _Optional[int] = ..., attempt: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., first_head: _Optional[int] = ..., heads: _Optional[int] = ..., on_device: _Optional[bool] = ..., group: _Optional[_Union[_common_pb2.KvKind, str]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("pages", "read")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    pages: FetchRequest
    read: StageRead
    def __init__(self, pages: _Optional[_Union[FetchRequest, _Mapping]] = ..., read: _Optional[_Union[StageRead, _Mapping]] = ...) -> None: ...

class StageRead(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("slots", "held")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    slots: StageSlots
    held: StageHeld
    def __init__(self, slots: _Optional[_Union[StageSlots, _Mapping]] = ..., held: _Optional[_Union[StageHeld, _Mapping]] = ...) -> None: ...

class StageSlots(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class StageHeld(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
