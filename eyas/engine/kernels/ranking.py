"""An order of (value, id) pairs as one int64 key: higher values first, and among equals lower ids.

So a maximum of keys is an argmax whose ties go to the lowest id, whatever the order of the comparisons. It
knows float32 values and ids from 0 to 2^31 - 1, and nothing of what they stand for.
"""

import triton
import triton.language as tl

NOBODY = tl.constexpr(-(2**63))  # the key below all others
LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def order_of(values):
    """int32 in the order of the float32 `values`."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_order(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lowest_key_of(values):
    """The key below all others of the value."""
    return order_of(values).to(tl.int64) << 32


@triton.jit
def key_of(values, ids):
    return lowest_key_of(values) | (-ids + LAST_ID).to(tl.int64)


@triton.jit
def value_of(keys):
    return value_of_order((keys >> 32).to(tl.int32))


@triton.jit
def id_of(keys):
    return -(keys & LAST_ID).to(tl.int32) + LAST_ID
