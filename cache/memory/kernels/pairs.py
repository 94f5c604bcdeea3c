"""The Triton kernel that stores keys and values as they are, ``store``. ``cache.memory.pair_kernel`` imports it where
Triton is installed.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["key_token", "key_head", "value_token", "value_head"])
def store(
    keys,  # [tokens, heads, DIM]
    values,  # [tokens, heads, VALUE]
    key_pool,  # [places, heads, DIM]
    value_pool,  # [places, heads, VALUE]
    places,  # [tokens] int64
    key_token,  # strides of keys and values
    key_head,
    value_token,
    value_head,
    heads,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # DIM, up to a power of two
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
):
    """One head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(places + token) * heads + head
    across = tl.arange(0, PADDED)
    x = tl.load(keys + token * key_token + head * key_head + across, mask=across < DIM)
    tl.store(key_pool + row * DIM + across, x, mask=across < DIM)
    across = tl.arange(0, PADDED_VALUE)
    x = tl.load(values + token * value_token + head * value_head + across, mask=across < VALUE)
    tl.store(value_pool + row * VALUE + across, x, mask=across < VALUE)
