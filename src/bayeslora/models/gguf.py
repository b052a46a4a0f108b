"""A strict reader of GGUF files, versions 2 and 3: key-value fields and tensors, straight from a memory map.

A file is ``magic, version, number of tensors, number of fields, fields, tensor descriptions, padding, data``, in little
endian. Nothing in it is trusted: every count and length is compared with the bytes that are left before anything is
read or allocated, so a damaged file costs no more than its own size and ends in one :class:`GGUFError`.

The ``gguf`` package reads the same values (a test compares all of them), but makes several numpy arrays for every word of the
vocabulary: opening SmolLM2 takes it more than twenty times as long, in seconds. Nor does it check lengths against the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from bayeslora.errors import InputError
from bayeslora.models.quants import FORMATS, BlockFormat, Bytes, Values, dequantize

T = TypeVar("T")

SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""numpy types of the fixed-size value types, by their number in the file; 7 is a boolean."""

BOOL, STRING, ARRAY = 7, 8, 9

Field = bool | int | float | str | list[str] | NDArray[Any]

MAX_DIMENSIONS = 4
MAX_NAME = 128
DEFAULT_ALIGNMENT = 32


class GGUFError(InputError):
    """A GGUF file is damaged or not supported."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor, still packed. ``shape`` is in numpy's order, ``raw [rows, bytes per row]`` a view of the file."""

    name: str
    shape: tuple[int, ...]
    form: BlockFormat
    raw: Bytes

    def values(self) -> Values:
        """The tensor in float32."""
        return dequantize(self.raw, self.form).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """Contents of a file. Arrays of strings are lists, other arrays are numpy arrays."""

    path: Path
    version: int
    fields: dict[str, Field]
    tensors: dict[str, GGUFTensor]

    def field(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a field, which must exist (unless it has a default) and have exactly this type."""
        value = self.fields.get(key, default)
        if value is None:
            raise GGUFError(f"{self.path}: field {key!r} is missing; is this file a language model with its tokenizer?")
        if type(value) is not kind:
            raise GGUFError(f"{self.path}: field {key!r} must be of type {kind.__name__}, got {type(value).__name__}")
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Read fields and tensor descriptions; the data stays on disk until it is used.

    Raises:
        GGUFError: the file cannot be read, is damaged, or uses an unsupported feature.
    """
    if not path.is_file():
        raise GGUFError(f"{path}: " + ("not a regular file" if path.exists() else "no such file"))
    try:
        data: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise GGUFError(f"{path}: the file is empty") from None
    cursor = _Cursor(path, data)
    version = _read_version(cursor)
    tensor_count = cursor.count("tensors", each=8 + 4 + 8 + 4 + 8)
    field_count = cursor.count("fields", each=8 + 4 + 1)
    fields = _read_fields(cursor, field_count)
    tensors = _read_tensors(cursor, tensor_count, _alignment(cursor, fields))
    return GGUFFile(path, version, fields, tensors)


class _Cursor:
    """A position in the file that never moves past its end."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.data = data
        self.view = data.data
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        raise GGUFError(f"{self.path}: {what}")

    @property
    def left(self) -> int:
        return len(self.view) - self.at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            self.fail(f"ends too early: {count} bytes expected at byte {self.at}, {self.left} left; get the file again")
        start, self.at = self.at, self.at + count
        return self.view[start : self.at]

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def count(self, what: str, *, each: int) -> int:
        """Read a count of entries that take at least ``each`` bytes."""
        count = self.u64()
        if count * each > self.left:
            self.fail(f"claims {count} {what} at byte {self.at - 8}, more than fit in the file; get the file again")
        return count

    def string(self) -> str:
        length = self.count("bytes of text", each=1)
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError:
            self.fail(f"text before byte {self.at} is not UTF-8; the file is damaged, get it again")

    def name(self) -> str:
        """Text that can be shown in a message."""
        name = self.string()
        if len(name) > MAX_NAME or not name.isprintable():
            self.fail(f"no name of a field or tensor, but other data, before byte {self.at}; get the file again")
        return name

    def scalar(self, kind: int) -> bool | int | float:
        dtype = np.dtype(SCALARS[kind])
        value = np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        return bool(value) if kind == BOOL else value

    def array(self) -> Field:
        kind = self.u32()
        if kind == STRING:
            return [self.string() for _ in range(self.count("strings", each=8))]
        if kind not in SCALARS:
            self.fail(f"unsupported type {kind} of array elements before byte {self.at}; the file may be damaged")
        dtype = np.dtype(SCALARS[kind])
        count = self.count("array elements", each=dtype.itemsize)
        array = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return array.astype(bool) if kind == BOOL else array

    def value(self) -> Field:
        kind = self.u32()
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            self.fail(f"unknown value type {kind} before byte {self.at}; the file may be damaged")
        return self.scalar(kind)


def _read_version(cursor: _Cursor) -> int:
    magic = bytes(cursor.take(min(4, cursor.left)))
    if magic != b"GGUF":
        cursor.fail(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = cursor.u32()
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            cursor.fail("a big-endian GGUF file; only little-endian files are supported")
        cursor.fail(f"GGUF version {version} is not supported, only 2 and 3 are")
    return version


def _read_fields(cursor: _Cursor, count: int) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for _ in range(count):
        key = cursor.name()
        if key in fields:
            cursor.fail(f"field {key!r} is given twice; the file may be damaged")
        fields[key] = cursor.value()
    return fields


def _alignment(cursor: _Cursor, fields: dict[str, Field]) -> int:
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"field 'general.alignment' must be a power of two, got {alignment!r}")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    descriptions = [_Description.read(cursor, alignment) for _ in range(count)]
    cursor.take(min(-cursor.at % alignment, cursor.left))
    data = cursor.data[cursor.at :]
    tensors: dict[str, GGUFTensor] = {}
    end = 0
    for it in sorted(descriptions, key=lambda d: d.offset):
        if it.name in tensors:
            cursor.fail(f"tensor {it.name!r} is listed twice; the file may be damaged")
        if it.offset < end:
            cursor.fail(f"tensor {it.name!r} overlaps another one; the file is damaged, get it again")
        end = it.offset + it.rows * it.row_bytes
        if end > len(data):
            cursor.fail(f"tensor {it.name!r} ends {end - len(data)} bytes after the file does; get the file again")
        raw = data[it.offset : end].reshape(it.rows, it.row_bytes)
        tensors[it.name] = GGUFTensor(it.name, it.shape, it.form, raw)
    return tensors


@dataclass(frozen=True)
class _Description:
    """A tensor as described by the header, not yet checked against the data."""

    name: str
    shape: tuple[int, ...]
    form: BlockFormat
    offset: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.form.size * self.form.bytes

    @classmethod
    def read(cls, cursor: _Cursor, alignment: int) -> _Description:
        name = cursor.name()
        dimensions = cursor.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
        code = cursor.u32()
        if code not in FORMATS:
            supported = ", ".join(form.name for form in FORMATS.values())
            cursor.fail(f"tensor {name!r} has the unsupported type number {code}; supported are {supported}")
        form = FORMATS[code]
        if min(shape) < 1 or shape[-1] % form.size:
            cursor.fail(
                f"tensor {name!r} of type {form.name} has the impossible shape {shape}; the file may be damaged"
            )
        offset = cursor.u64()
        if offset % alignment:
            cursor.fail(f"tensor {name!r} begins at byte {offset} of the data, not a multiple of {alignment}")
        return cls(name, shape, form, offset)
