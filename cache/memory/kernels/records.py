"""The Triton kernel that stores keys or values as records, ``store``. ``cache.memory.record_kernel`` imports it where
Triton is installed.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def store(
    tokens,  # [tokens, heads, DIM]
    numbers,  # [places, heads, DIM] uint8: of the records
    scales,  # [places, heads] float32: also
    places,  # [tokens] int64
    token_stride,
    head_stride,
    record,  # bytes
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # DIM, up to a power of two
    FP8: tl.constexpr,
):
    """One head of one token: what ``cache.memory.codec.quantise`` computes, bit for bit."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    across = tl.arange(0, PADDED)
    here = across < DIM
    x = tl.load(tokens + token * token_stride + head * head_stride + across, mask=here, other=0.0).to(tl.float32)
    top = 448.0 if FP8 else 127.0
    scale = tl.div_rn(tl.max(tl.abs(x), 0), top)
    scale = tl.where(tl.sum(x * 0.0, 0) == 0.0, scale, float("nan"))  # a maximum may pass over NaN
    x = tl.div_rn(x, tl.where(scale > 0, scale, 1.0) + tl.zeros([PADDED], tl.float32))
    x = tl.minimum(tl.maximum(x, -top), top)
    if FP8:
        bits = x.to(tl.int32, bitcast=True)
        sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # an addition aligns and rounds
        usual = (bits - 0x3C000000 + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        byte = sign | tl.where(bits < 0x3C800000, small, usual)
    else:
        byte = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # to the nearest, the even one of two
    place = tl.load(places + token)
    tl.store(numbers + place * record + head * DIM + across, byte.to(tl.uint8), mask=here)
    tl.store(scales + place * (record // 4) + head, scale)
