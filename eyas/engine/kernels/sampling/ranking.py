"""Orders (value, id) pairs by one int64 key: higher values first, and of equal values lower ids first.

So a maximum of keys is an argmax whose ties go to the lowest id, whatever the order of the comparisons.
"""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**63))  # the key below all others
LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def order_of(values):
    """int32 numbers in the same order as the float32 `values`."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_order(order):
    """The float32 value of an `order_of`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lowest_key_of(values):
    """The lowest key of the value: that of its highest id."""
    return order_of(values).to(tl.int64) << 32


@triton.jit
def key_of(values, ids):
    """The int64 key of float32 values and int32 ids."""
    return lowest_key_of(values) | (-ids + LAST_ID).to(tl.int64)


@triton.jit
def value_of(keys):
    """The float32 value of a key."""
    return value_of_order((keys >> 32).to(tl.int32))


@triton.jit
def marked(token):
    """A token of a row whose logits are not finite, as it goes to the host: below 0."""
    return -token - 1


@triton.jit
def unmarked(token):
    """The token itself, marked or not: what tables hold is always an id."""
    return tl.maximum(token, -token - 1)


@triton.jit
def id_of(keys):
    """The int32 id of a key."""
    return -(keys & LAST_ID).to(tl.int32) + LAST_ID
