"""The block formats of ggml, and their values in float32.

A row of a quantised tensor is a sequence of blocks, and the values of a block share their scales. Every decoder below
takes raw blocks ``[n, bytes]`` and returns values ``[n, size]``, all blocks in one go. With ``q`` the stored integers,
``d`` a scale and ``m`` an offset:

=========== ============================ ===================================================
Q4_0, Q5_0  ``d (q − 2^(bits−1))``       32 values
Q4_1, Q5_1  ``d q + m``                  32 values
Q8_0        ``d q``                      32 values
Q4_K, Q5_K  ``(d s_j) q − (d_m m_j)``    256 values, 6-bit ``s_j, m_j`` for each 32 of them
Q6_K        ``(d s_j) (q − 32)``         256 values, 8-bit ``s_j`` for each 16 of them
=========== ============================ ===================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]

CHUNK = 1 << 20
"""Values decoded at a time: intermediate arrays stay small, whatever the size of the tensor."""


class BlockFormat(NamedTuple):
    """How ``size`` values are packed into ``bytes`` bytes."""

    name: str
    size: int
    bytes: int
    decode: Callable[[Bytes], Values]


def dequantize(raw: Bytes, form: BlockFormat) -> Values:
    """Values ``[rows, columns]`` of raw rows ``[rows, bytes per row]``, which hold whole blocks."""
    blocks = np.ascontiguousarray(raw).reshape(-1, form.bytes)
    values = np.empty((len(blocks), form.size), dtype=np.float32)
    step = CHUNK // form.size
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; callers check the values
        for start in range(0, len(blocks), step):
            values[start : start + step] = form.decode(blocks[start : start + step])
    return values.reshape(len(raw), -1)


def _half(blocks: Bytes, start: int) -> Values:
    """The float16 stored at byte ``start`` of every block, ``[n, 1]``."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _bits(packed: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Fields of packed bytes ``[..., b]``: those at the first shift of all bytes, then those at the next, and so on."""
    fields = (packed[..., None, :] >> np.array(shifts, dtype=np.uint8)[:, None]) & np.uint8(mask)
    return fields.reshape(*packed.shape[:-1], -1)


def _nibbles(packed: Bytes) -> Bytes:
    return _bits(packed, (0, 4), 15)


def _fifth_bits(packed: Bytes) -> Bytes:
    """32 bits, the lowest first, as the value 16 or 0 each."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _plain(dtype: str) -> Callable[[Bytes], Values]:
    return lambda blocks: blocks.view(dtype).astype(np.float32)


def _bf16(blocks: Bytes) -> Values:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> Values:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Values:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Values:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Values:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Values:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _k_scales(blocks: Bytes) -> tuple[Any, Any]:
    """Scales and offsets ``[n, 8, 1]`` of the eight parts of a Q4_K or Q5_K block.

    Twelve bytes hold sixteen 6-bit numbers: the first four of each kind lie in the low bits of the first eight bytes;
    the last four have their low halves in the last four bytes and their high bits above the first ones.
    """
    low_s, low_m, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    s = np.concatenate([low_s & 63, (high & 15) | ((low_s >> 6) << 4)], axis=1)
    m = np.concatenate([low_m & 63, (high >> 4) | ((low_m >> 6) << 4)], axis=1)
    return (_half(blocks, 0) * s)[..., None], (_half(blocks, 2) * m)[..., None]


def _q4_k(blocks: Bytes) -> Values:
    scale, offset = _k_scales(blocks)
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scale * q - offset).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Values:
    scale, offset = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = _bits(blocks[:, 16:48], tuple(range(8)), 1).reshape(-1, 8, 32)
    return (scale * (low | (high << 4)) - offset).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Values:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(np.int8))[..., None]
    return (scale * ((low | (high << 4)).astype(np.float32) - 32)).reshape(-1, 256)


FORMATS = {
    0: BlockFormat("F32", 1, 4, _plain("<f4")),
    1: BlockFormat("F16", 1, 2, _plain("<f2")),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
"""Formats by their number in a GGUF file."""
