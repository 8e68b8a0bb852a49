"""Where new weights are, as bodies and messages say it. Words are checked here, bytes by workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.weights import (
    DTYPES,
    DeviceBuffer,
    DeviceSource,
    GroupSource,
    TensorMeta,
)

GroupBackend = Literal["nccl", "gloo"]
BACKENDS: tuple[str, ...] = get_args(GroupBackend)
MOST_NAME = 256  # characters of the name of weights, and of a group's
WAIT_S, MOST_WAIT_S = 300.0, 3600  # for requests that run


def device_source(texts: Sequence[str]) -> DeviceSource:
    """Buffers of a GPU, each as `eyas.client.weights` describes it. Raises InvalidRequest if one is none."""
    try:
        return DeviceSource(tuple(msgspec.json.decode(text, type=DeviceBuffer) for text in texts))
    except msgspec.DecodeError as error:
        message = f"serialized_named_tensors is no buffer of a GPU: {error}"
        raise InvalidRequest(message, param=DeviceSource.param) from None


def group_source(
    group: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> GroupSource:
    """Tensors that are broadcast. Raises InvalidRequest for lists that do not fit each other, and for a dtype
    that is none.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest("names, dtypes and shapes must be of equal length", param="names")
    for dtype in dtypes:
        if dtype.removeprefix("torch.") not in DTYPES:
            raise InvalidRequest(f"dtypes: {dtype[:50]} is no dtype of weights", param="dtypes")
    tensors = zip(names, dtypes, shapes, strict=True)
    metas = (TensorMeta(n, DTYPES[d.removeprefix("torch.")], tuple(shape)) for n, d, shape in tensors)
    return GroupSource(group, tuple(metas))
