from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bayeslora.errors import InputError
from bayeslora.models.gguf import GGUFError, GGUFFile, read_gguf

SCALARS = {
    "u8": ("add_uint8", 250),
    "i8": ("add_int8", -5),
    "u16": ("add_uint16", 65000),
    "i16": ("add_int16", -30000),
    "u32": ("add_uint32", 4_000_000_000),
    "i32": ("add_int32", -2_000_000_000),
    "u64": ("add_uint64", 2**63 + 1),
    "i64": ("add_int64", -(2**62)),
    "f32": ("add_float32", 0.15625),
    "f64": ("add_float64", 0.1),
    "yes": ("add_bool", True),
    "no": ("add_bool", False),
    "text": ("add_string", "grüß Gott\n😀"),
}
ARRAYS: dict[str, list[Any]] = {
    "strings": ["", "a b", "Ġthe", "😀"],
    "ints": [1, -2, 3],
    "floats": [0.5, -1.25],
    "bools": [True, False, True],
}


def test_every_kind_of_field_comes_back(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "test")
    for key, (method, value) in SCALARS.items():
        getattr(writer, method)(key, value)
    for key, array in ARRAYS.items():
        writer.add_array(key, array)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    _finish(writer)
    file = read_gguf(tmp_path / "x.gguf")
    assert file.version == 3
    for key, (_, value) in SCALARS.items():
        assert file.fields[key] == value and type(file.fields[key]) is type(value)
    for key, array in ARRAYS.items():
        assert list(file.fields[key]) == array  # type: ignore[arg-type]
    np.testing.assert_array_equal(file.tensors["t"].values(), np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_alignment_is_respected(tmp_path: Path, alignment: int) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "test")
    writer.add_custom_alignment(alignment)
    data = {f"t{k}": np.random.default_rng(k).standard_normal((k + 1, 3)).astype(np.float32) for k in range(4)}
    for name, values in data.items():
        writer.add_tensor(name, values)
    _finish(writer)
    tensors = read_gguf(tmp_path / "x.gguf").tensors
    assert tensors.keys() == data.keys()
    for name, values in data.items():
        np.testing.assert_array_equal(tensors[name].values(), values)


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(_file(version=2))
    assert read_gguf(path).version == 2


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _field(key: bytes, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _tensor(name: bytes = b"t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _string(name) + dims + struct.pack("<IQ", kind, offset)


def _file(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    fields: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (_tensor(),),
    counts: tuple[int, int] | None = None,
    data: int = 64,
) -> bytes:
    tensor_count, field_count = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<IQQ", version, tensor_count, field_count) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


HUGE = 2**62
BAD_FILES = {
    "empty": (b"", "is empty"),
    "magic": (_file(magic=b"GGML"), "not a GGUF file"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "version 1": (_file(version=1), "version 1 is not supported"),
    "version 0": (_file(version=0), "version 0 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "header only": (b"GGUF" + struct.pack("<I", 3), "ends too early"),
    "tensor count": (_file(counts=(HUGE, 0)), "more than fit"),
    "field count": (_file(counts=(1, HUGE)), "more than fit"),
    "string length": (_file(fields=(struct.pack("<Q", HUGE),)), "more than fit"),
    "array length": (_file(fields=(_field(b"k", 9, struct.pack("<IQ", 0, HUGE)),)), "more than fit"),
    "array of strings": (_file(fields=(_field(b"k", 9, struct.pack("<IQ", 8, HUGE)),)), "more than fit"),
    "nested array": (_file(fields=(_field(b"k", 9, struct.pack("<IQ", 9, 1)),)), "unsupported type 9"),
    "value type": (_file(fields=(_field(b"k", 13, bytes(8)),)), "unknown value type 13"),
    "not UTF-8": (_file(fields=(_field(b"\xff", 0, b"\1"),)), "not UTF-8"),
    "long key": (_file(fields=(_field(b"k" * 300, 0, b"\1"),)), "no name of a field or tensor"),
    "binary key": (_file(fields=(_field(b"k\0\n", 0, b"\1"),)), "no name of a field or tensor"),
    "field twice": (_file(fields=(_field(b"k", 0, b"\1"),) * 2), "field 'k' is given twice"),
    "alignment 0": (_file(fields=(_field(b"general.alignment", 4, bytes(4)),)), "power of two, got 0"),
    "alignment 24": (_file(fields=(_field(b"general.alignment", 4, struct.pack("<I", 24)),)), "power of two, got 24"),
    "alignment text": (_file(fields=(_field(b"general.alignment", 8, _string(b"x")),)), "power of two, got 'x'"),
    "tensor twice": (_file(tensors=(_tensor(), _tensor(offset=32))), "tensor 't' is listed twice"),
    "tensor type": (_file(tensors=(_tensor(kind=10),)), "unsupported type number 10"),
    "no dimension": (_file(tensors=(_tensor(shape=()),)), "0 dimensions"),
    "5 dimensions": (_file(tensors=(_tensor(shape=(1, 1, 1, 1, 1)),)), "5 dimensions"),
    "size 0": (_file(tensors=(_tensor(shape=(0, 4)),)), "impossible shape"),
    "part of a block": (_file(tensors=(_tensor(shape=(33,), kind=8),)), "impossible shape"),
    "too large": (_file(tensors=(_tensor(shape=(HUGE, HUGE)),)), "after the file does"),
    "cut off": (_file(tensors=(_tensor(shape=(17,)),)), "ends 4 bytes after the file does"),
    "offset": (_file(tensors=(_tensor(offset=96),)), "after the file does"),
    "unaligned": (_file(tensors=(_tensor(offset=8),)), "not a multiple of 32"),
    "overlap": (_file(tensors=(_tensor(b"a", (16,)), _tensor(b"b", offset=32))), "overlaps"),
}


@pytest.mark.parametrize("content, message", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert isinstance(caught.value, InputError)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="no such file"):
        read_gguf(tmp_path / "missing")
    with pytest.raises(GGUFError, match="not a regular file"):
        read_gguf(tmp_path)


def test_fields_are_typed() -> None:
    file = GGUFFile(Path("x.gguf"), 3, {"size": 3, "flag": True}, {})
    assert file.field("size", int) == 3
    assert file.field("other", str, "default") == "default"
    with pytest.raises(GGUFError, match=r"x\.gguf: field 'other' is missing"):
        file.field("other", str)
    with pytest.raises(GGUFError, match="field 'flag' must be of type int, got bool"):
        file.field("flag", int)
