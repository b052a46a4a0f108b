from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from bayeslora.models import quants
from bayeslora.models.quants import FORMATS, dequantize

QUANTISABLE = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]


def test_the_table_agrees_with_the_reference() -> None:
    for code, form in FORMATS.items():
        assert Type(code).name == form.name
        assert gguf.GGML_QUANT_SIZES[Type(code)] == (form.size, form.bytes)


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda k: k.name)
def test_quantised_numbers_come_back_as_the_reference_says(kind: Type) -> None:
    values = np.random.default_rng(0).standard_normal((7, 320)).astype(np.float32)
    raw = gguf.quants.quantize(values, kind).view(np.uint8)
    ours = dequantize(raw, FORMATS[kind])
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, kind).reshape(values.shape))
    np.testing.assert_allclose(ours, values, atol=0.3)


@pytest.mark.parametrize("code", FORMATS, ids=lambda c: FORMATS[c].name)
@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_are_decoded_bit_for_bit(code: int, seed: int) -> None:
    form = FORMATS[code]
    raw = np.random.default_rng(seed).integers(0, 256, (50, 4 * form.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, Type(code)).astype(np.float32)
    np.testing.assert_array_equal(dequantize(raw, form), expected.reshape(50, 4 * form.size))


@pytest.mark.parametrize("code", [3, 12, 14])
def test_chunks_do_not_show(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS[code]
    raw = np.random.default_rng(1).integers(0, 256, (13, 3 * form.bytes), dtype=np.uint8)
    whole = dequantize(raw, form)
    monkeypatch.setattr(quants, "CHUNK", 5 * form.size)
    np.testing.assert_array_equal(dequantize(raw, form), whole)
